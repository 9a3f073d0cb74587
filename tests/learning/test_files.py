"""A model directory: round trips, damage, kill -9 and a full disk, all of them real."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import blocktrain
from blocktrain.config import environment
from blocktrain.disk import errors_are_clear, write_atomically
from blocktrain.errors import BadModel, CannotSave
from blocktrain.learning.files import (
    ALIGNED,
    FORMAT,
    MAX_MANIFEST,
    from_parameters,
    load_model,
    load_tensors,
    read_manifest,
    save_model,
    save_tensors,
)
from blocktrain.learning.local import parameters_of
from blocktrain.learning.model import Model, Shape

MakeModel = Callable[[Shape], Model]
Sentence = Callable[[BaseException], str]

SHAPE = Shape(blocks=3, width=16, heads=2, window=12)
SOURCES = str(Path(blocktrain.__file__).parents[1])


def equal(a: Model, b: Model) -> bool:
    """The same model, bit for bit."""
    return (a.shape, a.noise) == (b.shape, b.noise) and all(
        torch.equal(x, y)
        for one, other in zip(a.blocks, b.blocks, strict=True)
        for x, y in zip(one.parameters(), other.parameters(), strict=True)
    )


# --- round trips --------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(model: Model, tmp_path: Path) -> None:
    manifest = save_model(model, tmp_path / "new" / "folder", {"by": "a test"})
    found = load_model(tmp_path / "new" / "folder")
    assert equal(model, found)
    assert read_manifest(tmp_path / "new" / "folder") == manifest
    assert manifest.made == {"by": "a test"}
    tokens = torch.randint(0, 256, (2, 12))
    assert torch.equal(model.log_probabilities(tokens), found.log_probabilities(tokens))
    assert not any(p.requires_grad for block in found.blocks for p in block.parameters())


def test_a_new_save_replaces_the_old_one_and_leaves_nothing(
    alive: MakeModel, tmp_path: Path
) -> None:
    save_model(alive(SHAPE), tmp_path)
    (tmp_path / ".block-1-0123.safetensors.99.part").write_bytes(b"left by a killed process")
    (tmp_path / "notes.txt").write_text("somebody's own")
    other = alive(Shape(blocks=2, width=32, heads=2, window=12))
    manifest = save_model(other, tmp_path)
    assert equal(load_model(tmp_path), other)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"manifest.json", "notes.txt", *(block.file for block in manifest.blocks)}


def test_a_file_says_its_size_and_digest(alive: MakeModel, tmp_path: Path) -> None:
    manifest = save_model(alive(SHAPE), tmp_path)
    for number, block in enumerate(manifest.blocks, start=1):
        body = (tmp_path / block.file).read_bytes()
        assert len(body) == block.bytes
        assert hashlib.sha256(body).hexdigest() == block.digest
        assert block.file == f"block-{number}-{block.digest[:16]}.safetensors"


def test_a_models_digest_names_shape_noise_and_blocks(alive: MakeModel, tmp_path: Path) -> None:
    model = alive(SHAPE)
    plain = save_model(model, tmp_path, {"made": 1}).digest
    assert save_model(model, tmp_path, {"made": 2}).digest == plain  # how is not what
    wider = Shape(blocks=3, width=16, heads=2, window=13)
    assert save_model(Model(wider, model.noise, model.blocks), tmp_path).digest != plain
    with torch.no_grad():
        model.blocks[2].head.out.weight[0, 0] += 1
    assert save_model(model, tmp_path).digest != plain


def test_saving_again_heals_a_damaged_file(alive: MakeModel, tmp_path: Path) -> None:
    manifest = save_model(alive(SHAPE), tmp_path)
    (tmp_path / manifest.blocks[1].file).write_bytes(b"damage")
    save_model(alive(SHAPE), tmp_path)
    assert equal(load_model(tmp_path), alive(SHAPE))


def test_a_loaded_model_can_be_saved_where_it_lies(alive: MakeModel, tmp_path: Path) -> None:
    save_model(alive(SHAPE), tmp_path)
    save_model(load_model(tmp_path), tmp_path)
    assert equal(load_model(tmp_path), alive(SHAPE))


def test_a_model_from_parameters_is_a_copy(model: Model) -> None:
    given = [parameters_of(block) for block in model.blocks]
    found = from_parameters(model.shape, model.noise, given)
    assert equal(found, model)
    with torch.no_grad():
        next(found.blocks[0].parameters()).zero_()
    assert not equal(found, model)
    assert not any(p.requires_grad for block in found.blocks for p in block.parameters())


def test_tensors_come_back_in_memory_of_their_own(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4).T, "step": torch.tensor(3.0)}
    save_tensors(tmp_path / "t.safetensors", tensors)
    found = load_tensors(tmp_path / "t.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    found["a"].zero_()
    assert torch.equal(load_tensors(tmp_path / "t.safetensors")["a"], tensors["a"])


@pytest.mark.parametrize("body", [None, b"", b"not safetensors at all"], ids=str)
def test_tensors_that_cannot_be_read(
    tmp_path: Path, body: bytes | None, sentence: Sentence
) -> None:
    if body is not None:
        (tmp_path / "t.safetensors").write_bytes(body)
    with pytest.raises(BadModel) as caught:
        load_tensors(tmp_path / "t.safetensors")
    assert "t.safetensors" in sentence(caught.value)


# --- damage -------------------------------------------------------------------------------------


@pytest.fixture
def folder(alive: MakeModel, tmp_path: Path) -> Path:
    save_model(alive(SHAPE), tmp_path / "model")
    return tmp_path / "model"


def block_file(folder: Path) -> Path:
    return folder / read_manifest(folder).blocks[1].file


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest as somebody with an editor would."""
    table = json.loads((folder / "manifest.json").read_text())
    change(table)
    (folder / "manifest.json").write_text(json.dumps(table))


def forge(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Changes block 2 and makes size and digest fit: only its content is wrong."""
    path = block_file(folder)
    tensors = {name: value.clone() for name, value in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
    body = path.read_bytes()
    rewrite(
        folder,
        lambda table: table["blocks"][1].update(
            bytes=len(body), digest=hashlib.sha256(body).hexdigest()
        ),
    )


def flip(folder: Path) -> None:
    body = bytearray(block_file(folder).read_bytes())
    body[-5] ^= 1
    block_file(folder).write_bytes(body)


def cut(folder: Path) -> None:
    path = block_file(folder)
    path.write_bytes(path.read_bytes()[:-100])


def folder_instead(folder: Path) -> None:
    path = block_file(folder)
    path.unlink()
    path.mkdir()


def outside(folder: Path) -> None:
    shutil.copy(block_file(folder), folder.parent / "outside.safetensors")
    rewrite(folder, lambda table: table["blocks"][1].update(file="../outside.safetensors"))


def not_safetensors(folder: Path) -> None:
    body = b"x" * 100
    block_file(folder).write_bytes(body)
    digest = hashlib.sha256(body).hexdigest()
    rewrite(folder, lambda table: table["blocks"][1].update(bytes=100, digest=digest))


def manifest_is(body: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "manifest.json").write_bytes(body)


def told(key: str, value: object) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda table: table["shape"].update({key: value}))


NAN = float("nan")
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "is not a model directory"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "is not a model directory"),
    "no block file": (lambda f: block_file(f).unlink(), "is missing"),
    "a folder instead of a block": (folder_instead, "is missing"),
    "cut short": (cut, "bytes instead of"),
    "a flipped bit": (flip, "does not have the digest"),
    "nan": (
        lambda f: forge(f, lambda t: t["head.out.weight"][0].fill_(NAN)),
        "'head.out.weight'",
    ),
    "infinity": (
        lambda f: forge(f, lambda t: t["head.norm.weight"][0].fill_(float("inf"))),
        "not finite",
    ),
    "wrong shape": (
        lambda f: forge(f, lambda t: t.update({"head.norm.weight": torch.ones(17)})),
        "does not hold block 2",
    ),
    "a missing tensor": (lambda f: forge(f, lambda t: t.pop("head.norm.weight")), "block 2"),
    "a tensor too many": (lambda f: forge(f, lambda t: t.update(x=torch.ones(1))), "block 2"),
    "another type": (
        lambda f: forge(f, lambda t: t.update({k: v.half() for k, v in t.items()})),
        "block 2",
    ),
    "not safetensors": (not_safetensors, "is not a safetensors file"),
    "blocks in another order": (
        lambda f: rewrite(f, lambda t: t["blocks"].reverse()),
        "does not hold block 1",
    ),
    "an unknown key": (
        lambda f: rewrite(f, lambda t: t.update(formt=1)),
        "unknown key 'formt'; did you mean 'format'?",
    ),
    "an unknown key in the shape": (
        lambda f: rewrite(f, lambda t: t["shape"].update(widht=16)),
        "did you mean 'width'?",
    ),
    "a missing key": (lambda f: rewrite(f, lambda t: t.pop("noise")), "noise"),
    "a newer format": (lambda f: rewrite(f, lambda t: t.update(format=FORMAT + 1)), "upgrade"),
    "a newer format with other keys": (
        lambda f: rewrite(f, lambda t: (t.pop("shape"), t.update(format=7, form={}))),
        "has format 7, this is for 2; upgrade blocktrain",
    ),
    "too few blocks": (lambda f: rewrite(f, lambda t: t["blocks"].pop()), "lists 2 of 3 blocks"),
    "a path outside": (outside, "is missing"),
    "an absolute path": (
        lambda f: rewrite(f, lambda t: t["blocks"][1].update(file="/etc/hostname")),
        "is missing",
    ),
    "the folder above": (
        lambda f: rewrite(f, lambda t: t["blocks"][1].update(file="..")),
        "is missing",
    ),
    "an endless name": (
        lambda f: rewrite(f, lambda t: t["blocks"][1].update(file="x" * 5000)),
        "is missing",
    ),
    "a name with a zero byte": (
        lambda f: rewrite(f, lambda t: t["blocks"][1].update(file="x\0y")),
        "is missing",
    ),
    "a huge manifest": (manifest_is(b" " * (MAX_MANIFEST + 1)), "too large"),
    "an empty manifest": (manifest_is(b""), "is damaged"),
    "half a manifest": (manifest_is(b'{"format": 1, "sha'), "is damaged"),
    "a manifest that is a list": (manifest_is(b"[]"), "is damaged"),
    "a manifest that is not text": (manifest_is(b'{"format": "\xff"}'), "is damaged"),
    "a manifest without end": (manifest_is(b'{"a":' + b"[" * 500_000), "is damaged"),
    "an impossible shape": (told("heads", 3), "does not divide"),
    "a million million layers": (told("layers", 10**12), "beyond"),
    "more layers than tensors": (told("layers", 10**6), "does not hold block 1"),
    "vectors beyond any machine": (told("gram_rows", 2**62), "beyond"),
    "a width beyond any machine": (told("width", 2**62), "beyond"),
    "text instead of a number": (told("width", "wide"), "shape.width"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_told_in_one_sentence(folder: Path, name: str, sentence: Sentence) -> None:
    damage, expected = DAMAGE[name]
    damage(folder)
    with pytest.raises(BadModel) as caught:
        load_model(folder)
    if "zero byte" not in name:
        assert str(folder) in sentence(caught.value) or name == "an impossible shape"
    assert expected in str(caught.value)
    assert caught.value.exit_code == 4


# --- a save that is cut off ---------------------------------------------------------------------

SAVE_AND_KILL = """
# Forks a saver that alternates between two models and kills it at some instant, many times.
import json, os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from blocktrain.learning.files import load_model, save_model
from blocktrain.learning.model import Model, Shape, new_block
from blocktrain.learning.noise import Noise

folder, shape = Path(sys.argv[1]), Shape(blocks=3, width=32, heads=2, window=12)
models = [Model(shape, Noise(), [new_block(shape, b, seed) for b in range(3)]) for seed in (1, 2)]
save_model(models[1], folder)
began = time.monotonic()
save_model(models[0], folder)
longest = 3 * (time.monotonic() - began) + 0.01  # instants from before a save to after the second
found, debris = [], 0
random.seed(0)
for kill in range(30):
    child = os.fork()
    if child == 0:
        try:
            for turn in range(10**6):
                save_model(models[(kill + turn) % 2], folder)
        finally:
            os._exit(1)
    time.sleep(random.uniform(0.0, longest))
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    debris += len(list(folder.iterdir())) > 4
    now = load_model(folder)  # checks every digest
    which = [
        all(
            torch.equal(x, y)
            for a, b in zip(now.blocks, m.blocks)
            for x, y in zip(a.parameters(), b.parameters())
        )
        for m in models
    ]
    found.append(which.index(True))
    if len(set(found[-4:])) == 1:
        longest *= 1.3  # the machine has become slower: let a save get through
save_model(models[0], folder)
print(json.dumps({"found": found, "debris": debris, "left": len(list(folder.iterdir()))}))
"""


def child(script: str, *arguments: str, under: tuple[str, ...] = ()) -> dict[str, Any]:
    """Runs a script in a process of its own and reads the JSON it prints last."""
    done = subprocess.run(
        [*under, sys.executable, "-c", script, *arguments],
        env=environment(PYTHONPATH=SOURCES, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_save_killed_at_any_instant_leaves_the_old_or_the_new_model(tmp_path: Path) -> None:
    told = child(SAVE_AND_KILL, str(tmp_path / "model"))
    assert len(told["found"]) == 30  # each load after a kill gave one of the two, whole
    assert set(told["found"]) == {0, 1}  # and they did change
    assert told["debris"] > 0  # some kills did come in the middle of a save
    assert told["left"] == 4  # which the next save cleared away


# --- a disk that is full ------------------------------------------------------------------------

SAVE_ON_A_FULL_DISK = """
import json, resource, subprocess, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from blocktrain.errors import CannotSave
from blocktrain.learning.export import export_hf
from blocktrain.learning.files import load_model, load_tensors, save_model, save_tensors
from blocktrain.learning.model import Model, Shape, new_block
from blocktrain.learning.noise import Noise

shape = Shape(blocks=3, width=64, heads=2, window=12, grams=1)  # about 300 kB a block
old, new = [
    Model(shape, Noise(), [new_block(shape, b, seed) for b in range(3)]) for seed in (1, 2)
]

def attempt(how, disk):
    disk.mkdir()
    if how != "limit":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    save_model(old, disk / "model")
    save_tensors(disk / "state.safetensors", {"a": torch.ones(1000)})
    if how == "full":
        (disk / "ballast").write_bytes(bytes(2**19))
    elif how == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # files end in the first block
    told = {}
    for name, save in {
        "model": lambda: save_model(new, disk / "model"),
        "tensors": lambda: save_tensors(disk / "state.safetensors", {"a": torch.ones(400_000)}),
        "export": lambda: export_hf(new, disk / "export"),
    }.items():
        try:
            save()
            told[name] = [0, "saved"]
        except CannotSave as error:
            told[name] = [error.exit_code, str(error)]
    found = load_model(disk / "model")
    whole = all(
        torch.equal(x, y)
        for a, b in zip(found.blocks, old.blocks)
        for x, y in zip(a.parameters(), b.parameters())
    )
    told["intact"] = whole and load_tensors(disk / "state.safetensors")["a"].numel() == 1000
    told["parts"] = [path.name for path in disk.rglob("*.part")]
    return told

print(json.dumps({how: attempt(how, Path(sys.argv[1]) / how) for how in sys.argv[2:]}))
"""


def can_mount() -> bool:
    """Whether this process may make a disk of its own."""
    try:
        command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def full_disks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What saving came to on each disk; the limit is last, as nothing can lift it again."""
    place = str(tmp_path_factory.mktemp("disks"))
    if can_mount():
        kinds, under = ["full", "read-only", "limit"], ("unshare", "--mount")
        return child(SAVE_ON_A_FULL_DISK, place, *kinds, under=under)
    return child(SAVE_ON_A_FULL_DISK, place, "limit")


@pytest.mark.parametrize("how", ["limit", "full", "read-only"])
def test_a_full_disk_leaves_the_old_model_and_one_sentence(
    full_disks: dict[str, Any], how: str
) -> None:
    if how not in full_disks:
        pytest.skip("needs the right to mount a small disk; the limit of file sizes was tested")
    found = full_disks[how]
    for name in ("model", "tensors", "export"):
        code, text = found[name]
        assert code == 6, (name, text)
        assert ("Read-only file system" if how == "read-only" else "The disk is full") in text
        assert "what was saved before is intact" in text
        assert "\n" not in text
    assert found["intact"] is True
    assert found["parts"] == []


def test_a_file_where_the_folder_should_be(
    alive: MakeModel, tmp_path: Path, sentence: Sentence
) -> None:
    (tmp_path / "model").write_text("a file")
    with pytest.raises(CannotSave) as caught:
        save_model(alive(SHAPE), tmp_path / "model")
    assert "Cannot write" in sentence(caught.value)
    assert (tmp_path / "model").read_text() == "a file"


def test_other_errors_pass_through_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), errors_are_clear(tmp_path):
        raise ValueError("mine")


def test_an_atomic_write_replaces_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    before = path.open("rb")
    write_atomically(path, b"new")
    with before:
        assert before.read() == b"old"  # whoever reads the old one reads all of it
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_models_of_before_runs_had_vectors_open_as_they_were(
    tmp_path: Path, alive: MakeModel
) -> None:
    model = alive(replace(SHAPE, grams=1))
    save_model(model, tmp_path)

    def older(table: dict[str, Any]) -> None:
        table["format"] = 1
        del table["shape"]["grams"], table["shape"]["gram_rows"]

    rewrite(tmp_path, older)
    assert load_model(tmp_path).shape == model.shape


@pytest.mark.parametrize("names", [1, 2, 5, 9])
def test_values_are_mapped_where_torch_would_put_them(tmp_path: Path, names: int) -> None:
    tensors = {"x" * (number + 1): torch.randn(16) for number in range(names)}
    save_tensors(tmp_path / "file", tensors)
    assert all(value.data_ptr() % ALIGNED == 0 for value in load_file(tmp_path / "file").values())
    assert all(torch.equal(load_tensors(tmp_path / "file")[n], v) for n, v in tensors.items())
