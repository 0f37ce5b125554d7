"""Advice after a failed write, by the system's error number."""

from __future__ import annotations

import errno

_REMEDIES = {
    "free space": (errno.ENOSPC,),
    "free space or ask for a larger quota": (errno.EDQUOT,),
    "raise the limit on file sizes (ulimit -f)": (errno.EFBIG,),
    "see that the network disk is mounted and answers": (
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.EHOSTDOWN,
    ),
    "see that the folder can be written": (errno.EROFS, errno.EACCES, errno.EPERM),
    "raise the limit on open files (ulimit -n)": (errno.EMFILE, errno.ENFILE),
}


def remedy(error: OSError) -> str:
    """Advice to the user before trying again, as a clause."""
    return next((text for text, numbers in _REMEDIES.items() if error.errno in numbers), "check the disk")
