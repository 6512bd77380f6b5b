"""Checkpoints, runs and corpora on any store that fsspec reaches, never torn, never silently wrong.

    errors        what can go wrong, worded for the person
    store         `open_store`: named bytes under a URL, with an atomic create-if-absent
    verified      zarr stores that record what is written and verify what is read
    tensors       named torch tensors as zarr arrays
    checkpoint    parts written by many workers, committed by one manifest
    runs          the record and the blobs of a run
    tokens        a tokenised corpus, read in random windows

Import from the modules: the package itself imports nothing, so that a command line starts fast. It
knows nothing of models beyond named tensors and imports no other Fusion package.
"""

__all__: list[str] = []
