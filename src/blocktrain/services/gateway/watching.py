"""What the playground is told: traversal by traversal, and who serves."""

from collections.abc import Sequence
from typing import Any

from blocktrain.inference.pipeline import StageReport
from blocktrain.services.gateway.openai import CODECS, Offer, Wanted, default_mode, modes_for
from blocktrain.services.gateway.telling import Begun, Ended, Event, Glimpse, Piece, Source, Waiting


def told(event: Event, wanted: Wanted) -> dict[str, Any]:
    """An event as the page reads it."""
    seed = wanted.sampling.seed
    match event:
        case Waiting(count):
            return {"say": "waiting", "count": count}
        case Begun():
            return {"say": "begun", "seed": seed}
        case Glimpse(stage, text):
            return {"say": "sight", "stage": stage, "text": text}
        case Piece():
            return {
                "say": "piece",
                "text": event.shown.text,
                "bytes": event.bytes,
                "guessed": event.guessed,
                "seconds": event.said.seconds,
                "sent": event.said.sent,
                "replayed": event.said.replayed,
                "legs": event.legs,
            }
        case Ended():
            return {
                "say": "ended",
                "text": event.shown.text,
                "bytes": event.generated,
                "seed": seed,
                "reason": event.reason,
                "report": event.report,
            }


def picture(source: Source, name: str, offer: Offer) -> dict[str, Any]:
    """What is served and by whom."""
    objective, stages = source.shape.objective, source.report()
    return {
        "model": name,
        "blocks": source.shape.blocks,
        "window": source.shape.window,
        "mode": default_mode(objective),
        "modes": modes_for(objective),
        "codec": offer.codec,
        "codecs": CODECS,
        "max_tokens": offer.max_tokens,
        "max_prompt": offer.max_prompt,
        "ready": covered(stages, source.shape.blocks),
        "stages": stages,
        "troubles": source.troubles,
    }


def covered(stages: Sequence[StageReport], blocks: int) -> bool:
    """Whether some route leads through every block of one model."""
    reached = {(stage.model, 0) for stage in stages}
    for stage in sorted(stages, key=lambda stage: stage.first):
        if (stage.model, stage.first) in reached:
            reached.add((stage.model, stage.last + 1))
    return any(end == blocks for _, end in reached)
