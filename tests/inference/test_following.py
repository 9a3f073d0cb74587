"""A pipeline that moves to another checkpoint while texts are written, and papers that end."""

import asyncio
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.inference.network import CUTS, SMALL, Board, Network, living_model, run, until, write

from blocktrain.errors import BadKey
from blocktrain.inference import reach
from blocktrain.inference.local import LocalSession
from blocktrain.inference.pipeline import Pipeline
from blocktrain.inference.span import Span
from blocktrain.inference.stage import Stage
from blocktrain.learning.files import save_model
from blocktrain.terms import Digest
from blocktrain.wire.signing import load_key, new_key
from blocktrain.wire.tls import Papers

LENGTH = 6


@pytest.fixture(autouse=True)
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(reach, "REFUSED", 0.05)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("following")
        patch.setenv("BLOCKTRAIN_CACHE", str(folder / "cache"))
        yield Network(folder / "network")


@pytest.fixture(scope="module")
def newer(network: Network) -> tuple[Digest, list[Span]]:
    """Another checkpoint of the same model, cut into the same stages."""
    model, folder = living_model(SMALL), network.folder / "newer"
    for block in model.blocks:
        block.head.out.weight.data *= -1
    digest = save_model(model, folder).digest
    return digest, [Span.open(folder, *cut) for cut in CUTS]


async def local(span: Span) -> bytes:
    return (await write(LocalSession(span), LENGTH))[0]


def test_a_pipeline_moves_when_the_newer_checkpoint_is_covered(
    network: Network, newer: tuple[Digest, list[Span]]
) -> None:
    digest, spans = newer

    async def text_of(pipeline: Pipeline) -> tuple[bytes, set[str]]:
        session = await pipeline.session("fp32")
        found, told = await write(session, LENGTH)
        await session.close()
        return found, {hop.stage for said in told for hop in said.hops}

    async def test() -> None:
        old_text = await local(network.span(0, 2))
        new_text = await local(Span.open(network.folder / "newer", 0, 2))
        assert old_text != new_text
        board = Board()
        async with network.serving(*CUTS) as old, network.pipeline(board) as pipeline:
            board.put(*old)
            assert (await text_of(pipeline))[0] == old_text
            begun = await pipeline.session("fp32")
            new = [network.stage(span) for span in spans]
            async with new[0], new[1]:
                board.put(*new[:2])
                await until(lambda: bool(pipeline.troubles))
                assert "serves another model" in pipeline.troubles[0]
                pipeline.follow(digest)
                await until(lambda: len(pipeline.report()) == 5)
                # Two of three are there: the newer one is not covered, and nothing is mixed.
                assert await text_of(pipeline) == (old_text, {stage.id for stage in old})
                async with new[2]:
                    board.put(new[2])
                    await until(lambda: len(pipeline.report()) == 6)
                    assert await text_of(pipeline) == (new_text, {stage.id for stage in new})
                    assert (await write(begun, LENGTH))[0] == old_text
                    for stage in old:
                        board.take(stage)
                        await stage.close()
                    await until(lambda: len(pipeline.report()) == 3)
                    assert (await text_of(pipeline))[0] == new_text
                    await begun.close()

    run(test)


# Papers that end.


def renewed(network: Network, papers: Papers, life: float) -> None:
    """New papers for the same key, in the same file."""
    made = network.authority.issue_member(load_key(papers.key).id, timedelta(seconds=life))
    papers.certificate.write_bytes(made)


def test_new_papers_are_loaded_while_texts_are_written(network: Network) -> None:
    async def test() -> None:
        text = await local(network.span(0, 2))
        papers = [network.papers(life=timedelta(seconds=3)) for _ in range(4)]
        end = time.monotonic() + 3
        pem, spans = network.authority.pem, [network.span(*cut) for cut in CUTS]
        stages = [Stage(s, p, pem) for s, p in zip(spans, papers[:3], strict=True)]
        async with stages[0], stages[1], stages[2]:
            board = Board()
            board.put(*stages)
            async with Pipeline(SMALL, network.digest, papers[3], pem, board) as pipeline:
                session = await pipeline.session("fp32")
                assert (await write(session, LENGTH))[0] == text
                for each in papers:
                    renewed(network, each, 60)
                pipeline.renew()
                for stage in stages[:2]:  # the last one misses it
                    stage.renew()
                await asyncio.sleep(end - time.monotonic() + 1.1)  # whole seconds are written
                found, told = await write(session, LENGTH)  # on links that were there before
                assert found == text
                assert not any(said.replayed for said in told)
                async with network.visitor(papers[3]) as visitor:
                    for stage in stages[:2]:
                        await visitor.visit(stage.port, stage.id)
                        assert await visitor.hear()
                    with pytest.raises(Exception, match="does not answer"):
                        await visitor.visit(stages[2].port, stages[2].id)
                    stages[2].renew()
                    await visitor.visit(stages[2].port, stages[2].id)
                    assert await visitor.hear()

    run(test)


def test_papers_that_cannot_be_loaded_change_nothing(network: Network, tmp_path: Path) -> None:
    async def test() -> None:
        papers = network.papers()
        async with Stage(network.span(0, 2), papers, network.authority.pem) as stage:
            good = papers.certificate.read_bytes()
            papers.certificate.write_bytes(network.authority.issue_member(new_key().id))
            with pytest.raises(BadKey):
                stage.renew()
            papers.certificate.write_bytes(b"garbage")
            with pytest.raises(BadKey):
                stage.renew()
            async with network.guest(stage):  # it still shows the old ones
                pass
            papers.certificate.write_bytes(good)
            stage.renew()

    run(test)
