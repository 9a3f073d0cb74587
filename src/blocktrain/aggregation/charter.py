"""What everyone in a run agrees on. `blocktrain init` writes it; its digest names the run."""

import hashlib

import msgspec
from msgspec import Struct

from blocktrain.aggregation.combine import Averaging
from blocktrain.aggregation.deadlines import Rules
from blocktrain.errors import BadInput
from blocktrain.terms import Digest
from blocktrain.wire.codecs import CODECS
from blocktrain.wire.messages import Name, Sha256
from blocktrain.wire.tensors import Shapes, largest

LARGEST_BLOCK = 2**34  # bytes of a block in fp32: beyond it a charter is a mistake, or an attack
MOST_BLOCKS = 4096


class Charter(Struct, frozen=True, forbid_unknown_fields=True):
    """A run's settings. The coordinator does not look into those for learning."""

    name: Name
    data: Name
    """What the text is called, for workers who can fetch it themselves."""
    corpus: Sha256
    splits: tuple[tuple[int, Sha256], ...]
    """Length and sha256 of its splits train, valid and test."""
    corpus_served: bool
    """Whether the coordinator serves the text to its workers."""
    codec: Name
    """Of updates and of deltas."""
    rules: Rules
    averaging: Averaging
    blocks: tuple[dict[str, tuple[int, ...]], ...]
    """Names and shapes of each block's tensors."""
    first: tuple[Sha256, ...]
    """The snapshots of round 0."""
    learning: str
    """Settings for the workers, as JSON."""

    def shapes(self, block: int) -> Shapes:
        """What every body of this block's tensors holds."""
        return self.blocks[block]

    def update_size(self, block: int) -> int:
        """Bytes of an update, or of a delta: no more and no less."""
        return largest(self.codec, self.blocks[block])

    def snapshot_size(self, block: int) -> int:
        """Bytes of a snapshot or a steady copy."""
        return largest("fp32", self.blocks[block])

    def bytes_before(self, round: int) -> int:
        """Bytes that a block is planned to have seen when this round opens.

        As planned, not as received: a block that lost updates must still end its decay.
        """
        rules = self.rules
        return rules.steps.before(round) * rules.bytes_per_step * rules.replicas


def encode(charter: Charter) -> bytes:
    """The charter as it is stored, sent and named."""
    return msgspec.json.encode(charter, order="deterministic")


def run_id(body: bytes) -> Digest:
    """The run's name."""
    return Digest(hashlib.sha256(body).hexdigest())


def decode(body: bytes | str) -> Charter:
    """A charter from anybody, or a sentence that says what is wrong with it."""
    try:
        charter = msgspec.json.decode(body, type=Charter)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"The run's charter is not understood ({error}); upgrade.") from None
    count = charter.rules.blocks
    if not 1 <= count <= MOST_BLOCKS or len(charter.blocks) != count or len(charter.first) != count:
        raise BadInput(f"The run's charter does not describe {count} blocks; make the run again.")
    if charter.codec not in CODECS:
        raise BadInput(f"The run's codec '{charter.codec}' is unknown here; upgrade blocktrain.")
    for block in range(count):
        sizes = [size for shape in charter.blocks[block].values() for size in shape]
        if any(size < 1 for size in sizes) or charter.snapshot_size(block) > LARGEST_BLOCK:
            raise BadInput(f"Block {block + 1} of the run's charter has an impossible shape.")
    return charter
