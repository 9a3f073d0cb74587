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
    └── Leak                   7   the audit found that a target reached the model

The number is the exit code of the command line. 130 is Ctrl+C. Every message is one sentence that
says what happened and what to do.
"""


class BlockTrainError(Exception):
    """Anything BlockTrain itself reports."""

    exit_code = 1


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
