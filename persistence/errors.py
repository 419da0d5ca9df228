"""What a store can refuse, split by what the catcher would do about it.

Every class takes one finished sentence, so an error survives pickling on its way between actors.
"""


class StoreError(Exception):
    """Root of every error that a store or a checkpoint raises on purpose."""


class CorruptValueError(StoreError):
    """Bytes on disk are not what was written: restore them, or save the key again."""


class NewerFormatError(StoreError):
    """A newer version wrote this: run that version; nothing was changed."""


class OlderFormatError(StoreError):
    """An older version wrote this, in a way that is gone: run that one; nothing was changed."""


class StoreLockedError(StoreError):
    """Another live writer holds the store: stop it, wait for it, or open read-only."""


class StaleWriterError(StoreError):
    """A later writer has taken the store over: this process must stop writing for good."""


class StoreNotWritableError(StoreError):
    """The store cannot be changed from here: fix the folder, the disk or the opening."""


class NothingSavedError(StoreNotWritableError):
    """The system refused before anything was changed: the store is as it was."""


class StoreNotReadableError(StoreError):
    """The system refuses to read the store: fix the folder or the disk."""


class StoreMissingError(StoreNotReadableError):
    """There is no store there yet: nothing was ever saved, or the path is wrong."""


class OtherStoreError(StoreError):
    """Another store, or an older copy, is in the place of the one that was used: bring it back."""


class StoreClosedError(StoreError):
    """The store was closed, or this process inherited it through a fork: open it again."""


class RecordRefusedError(StoreError):
    """A record cannot be a checkpoint: it cannot be pickled, or holds a class not allowed."""
