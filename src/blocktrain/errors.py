"""Everything that can go wrong and that a caller handles differently.

    BlockTrainError            1   anything below; also a bug's last resort
    ├── BadInput               2   what was asked makes no sense: say it differently
    │   └── BadConfig          2   a key or value in a config or a flag
    ├── BadCorpus              3   text that is missing, cut short, or not what its digest says
    │   └── CannotFetch        3   no network and no cache
    ├── BadModel               4   a model directory that is missing, damaged or not finite
    │   └── CannotExport       4   a model that has no standard form
    ├── BadArchive             5   a compressed file that cannot be opened here
    ├── CannotSave             6   the disk is full or read-only; what was there before still is
    ├── Leak                   7   the audit found that a target reached the model
    ├── Unreachable            8   the other side does not answer
    ├── NotAllowed             9   no token, a revoked one, a banned worker, a wrong fingerprint
    ├── OtherProtocol         10   the two sides speak different versions
    ├── BadRun                11   a run's folder that is missing, damaged, or in use
    │   ├── BadLedger         11   its ledger is missing, damaged, or of a newer BlockTrain
    │   └── BadBlob           11   what is stored is not what its digest says
    │       └── NoBlob        11   nothing is stored under this digest
    ├── BadKey                12   a key file that is missing, damaged, or open to others
    ├── TrafficSpent          13   a volunteer's traffic is used up
    ├── Different             14   work done again came out otherwise
    └── Contradiction          1   what is to be written contradicts what is written
    and, of what comes over the wire, below BadInput:
        RefusedBlob                what was given is not what its digest says, or the digest is none
        └── BlobTooLarge           it is longer than the limit
        BadTensors                 a body that is not what its codec makes of the expected tensors

The number is the exit code of the command line. 130 is Ctrl+C. Every message is one sentence that
says what happened and what to do.
"""

from collections.abc import Mapping
from types import MappingProxyType


class BlockTrainError(Exception):
    """Anything BlockTrain itself reports."""

    exit_code = 1
    told: Mapping[str, object] = MappingProxyType({})
    """What a program learns besides (--json), such as what a worker gave before it."""


class BadInput(BlockTrainError):
    """What was asked makes no sense."""

    exit_code = 2


class BadConfig(BadInput):
    """A key or a value in a config, or a flag, that cannot be."""


class BadCorpus(BlockTrainError):
    """Text that is missing, cut short, or not what its digest says."""

    exit_code = 3


class CannotFetch(BadCorpus):
    """The text is not in the cache, and it cannot be fetched."""


class BadModel(BlockTrainError):
    """A model directory that is missing, damaged or not finite."""

    exit_code = 4


class CannotExport(BadModel):
    """A model that has no standard form."""


class BadArchive(BlockTrainError):
    """A compressed file that cannot be opened here."""

    exit_code = 5


class CannotSave(BlockTrainError):
    """The disk is full or read-only."""

    exit_code = 6


class Leak(BlockTrainError):
    """A target reached the model."""

    exit_code = 7


class Unreachable(BlockTrainError):
    """The other side does not answer."""

    exit_code = 8


class NotAllowed(BlockTrainError):
    """No token, a revoked one, a banned worker, or a wrong fingerprint."""

    exit_code = 9


class OtherProtocol(BlockTrainError):
    """The two sides speak different versions; the sentence says which one to upgrade."""

    exit_code = 10


class BadRun(BlockTrainError):
    """A run's folder that is missing, damaged, or in use by another coordinator."""

    exit_code = 11


class BadLedger(BadRun):
    """A ledger that is missing, damaged, or of a newer BlockTrain."""


class BadBlob(BadRun):
    """What is stored is not what its digest says."""


class NoBlob(BadBlob):
    """Nothing is stored under this digest."""


class BadKey(BlockTrainError):
    """A key file that is missing, damaged, or open to others."""

    exit_code = 12


class TrafficSpent(BlockTrainError):
    """The volunteer's traffic is used up."""

    exit_code = 13


class Different(BlockTrainError):
    """Work that was done again came out otherwise."""

    exit_code = 14


class Contradiction(BlockTrainError):
    """What is to be written contradicts what is written."""


class RefusedBlob(BadInput):
    """What was given is not what its digest says, or the digest is none."""


class BlobTooLarge(RefusedBlob):
    """The blob is longer than the limit."""


class BadTensors(BadInput):
    """A body that is not what its codec makes of the expected tensors."""
