"""The log on stderr: text for people, or one JSON object a line."""

import logging
import sys
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from blocktrain.console import Output

How = Literal["text", "json"]


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """What a log collector reads."""
        line: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "from": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def log_as(how: How) -> None:
    """Sends the log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if how == "json" else plain)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # Machines get every event; people would have two lines for every update.
    logging.getLogger("blocktrain.events").setLevel("DEBUG" if how == "json" else "INFO")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for every request of ours


@dataclass(frozen=True)
class Logged(Output):
    """How a command answers that goes on for days."""

    log: How = "text"
    """How to log: text for people, json for machines."""

    def say(self, text: str) -> None:
        """A line for people; a collector gets it as a line of the log."""
        if self.log == "json":
            logging.getLogger("blocktrain").info(text)
        else:
            super().say(text)
