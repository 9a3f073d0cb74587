"""Vectors of bytes and of runs of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from blocktrain.errors import BadConfig
from blocktrain.learning.embedding import FACTORS, MOST, NOTHING, Embedding, places
from blocktrain.learning.model import VOCABULARY, Cache, Model, Shape, causal_sight

MakeModel = Callable[[Shape], Model]
REACH, VECTORS = 5, 64


def text(*size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, size, generator=torch.Generator().manual_seed(seed))


def test_a_run_has_one_vector_wherever_it_stands() -> None:
    known = text(2, 40)
    known[1, 20:26] = known[0, 10:16]
    found = places(known, REACH, VECTORS)
    assert torch.equal(found[:, 0, 15 - REACH], found[:, 1, 25 - REACH])


@pytest.mark.parametrize("length", range(2, REACH + 2))
def test_a_run_is_told_from_those_that_differ_in_one_byte(length: int) -> None:
    """With as many vectors as 2^40 none of these meet; only what is in the run counts."""
    known = text(1, REACH + 1)
    for back in range(REACH + 1):
        other = known.clone()
        other[0, REACH - back] = (other[0, REACH - back] + 7) % 256
        pair = [places(each, REACH, 2**40)[length - 2, 0, 0] for each in (known, other)]
        assert (pair[0] != pair[1]) == (back < length)


def test_runs_of_each_length_have_vectors_of_their_own() -> None:
    found = places(text(4, 300), REACH, VECTORS)
    for number, of_length in enumerate(found):
        assert int(of_length.min()) >= number * VECTORS
        assert int(of_length.max()) < (number + 1) * VECTORS


def test_runs_are_spread_evenly() -> None:
    """English bytes are few and alike; a hash that folds them together would leave rows unused."""
    letters = text(64, 300) % 26 + 97
    for of_length in places(letters, REACH, VECTORS):
        counts = torch.bincount(of_length.flatten() % VECTORS, minlength=VECTORS)
        assert counts.min() > 0.3 * counts.float().mean()
        assert counts.max() < 3 * counts.float().mean()


def test_no_sum_leaves_what_an_integer_holds() -> None:
    assert sum(factor * (VOCABULARY + 1) for factor in FACTORS) < 2**63
    assert len(set(FACTORS)) == MOST


def test_vectors_of_runs_start_at_nothing_and_learn() -> None:
    embed = Embedding(VOCABULARY, 8, REACH + 1, VECTORS)
    known = text(1, REACH + 3)
    out = embed(known)
    assert torch.equal(out, torch.nn.functional.embedding(known[:, REACH:], embed.weight))
    out.sum().backward()
    assert embed.runs.grad is not None
    touched = embed.runs.grad.abs().sum(1).nonzero().flatten()
    assert set(touched.tolist()) == set(places(known, REACH, VECTORS).flatten().tolist())


def test_single_bytes_only() -> None:
    embed = Embedding(VOCABULARY, 8, 1, VECTORS)
    assert [name for name, _ in embed.named_parameters()] == ["weight"]
    assert embed(text(2, 4)).shape == (2, 4, 8)


def test_a_window_begins_with_nothing_before_it() -> None:
    sight = causal_sight(Shape(), 4)
    known = sight.known(text(1, 4), REACH)
    assert known[0, :REACH].tolist() == [NOTHING] * REACH
    assert torch.equal(known[:, REACH:], text(1, 4))


def test_a_cache_remembers_what_came_before(alive: MakeModel) -> None:
    """Vectors in parts are those of the whole; what was taken back is forgotten."""
    shape = Shape(blocks=1, width=16, heads=2, window=24, grams=4, gram_rows=32)
    block, tokens = alive(shape).blocks[0], text(2, 20)
    whole = block.enter(tokens, causal_sight(shape, 20))
    cache = Cache(2, 24)
    for start, end, wrong in ((0, 1, 0), (1, 9, 3), (9, 20, 0)):
        part = torch.cat((tokens[:, start:end], text(2, wrong, seed=1)), 1)
        sight = cache.sight(part.shape[1], shape, torch.device("cpu"))
        out = block.enter(part, sight)[:, : end - start]
        assert torch.equal(out, whole[:, start:end])
        cache.filled = end


@pytest.mark.parametrize(("settings", "said"), [({"grams": 0}, "grams is 0"),
                                                ({"gram_rows": 0}, "gram_rows is 0"),
                                                ({"grams": 33}, "at most 32")])  # fmt: skip
def test_numbers_that_make_no_sense(settings: dict[str, int], said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        Shape(**settings)  # type: ignore[arg-type]
