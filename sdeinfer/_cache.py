"""JAX's persistent compilation cache, in the user's cache folder."""

import hashlib
import os
import platform
import sys
import warnings
from pathlib import Path

import jax
import platformdirs

CACHE_BYTES = 2**26
"""Largest size in bytes of the cache after a start; hundreds of programs take 3 MB. JAX's own bound looks at every file
before each write, and waits for a lock on every read."""


def use_compilation_cache() -> Path | None:
    """Keep compiled programs in the user's cache folder, and load those that were compiled before.

    For applications and notebooks, before the first computation: it changes JAX's process-wide configuration. The
    folder is `sdeinfer` in the user's cache folder ($XDG_CACHE_HOME or ~/.cache on Linux), with one subfolder per CPU.
    Cached programs are executed, so only the user may write to the folder. Errors of the cache are silent; a program
    that cannot be read or written is compiled.

    Returns:
        The folder. None if SDEINFER_NO_CACHE=1, if JAX already has another folder, as by JAX_COMPILATION_CACHE_DIR, or
        if the folder cannot be used.
    """
    if os.environ.get("SDEINFER_NO_CACHE", "") not in ("", "0") or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return None
    try:
        folder = Path(platformdirs.user_cache_dir("sdeinfer", appauthor=False)) / _cpu()
        known = jax.config.jax_compilation_cache_dir
        if known is not None:
            return folder if known == str(folder) else None
        if not _is_ours(folder):
            return None
        _tidy(folder)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return None
    warnings.filterwarnings("ignore", r"Error (reading|writing) persistent compilation cache entry")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


def _cpu() -> str:
    """A hash of the CPU's model and features: XLA compiles for them, but JAX's cache keys do not contain them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        features = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    except OSError:
        features = [platform.processor()]
    return hashlib.sha256("\n".join([platform.machine(), *features]).encode()).hexdigest()[:12]


def _is_ours(folder: Path) -> bool:
    """Make the folder, and return whether only the user may write there."""
    if not folder.is_absolute():  # the user has no home
        return False
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for directory in (folder.parent, folder):
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.stat()
        if sys.platform != "win32" and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
            return False
    return True


def _tidy(folder: Path) -> None:
    """Remove the least recently used programs beyond `CACHE_BYTES`."""
    files, size = [(file, file.stat()) for file in folder.iterdir()], 0
    for file, status in sorted(files, key=lambda entry: max(entry[1].st_atime, entry[1].st_mtime), reverse=True):
        size += status.st_size
        if size > CACHE_BYTES:
            file.unlink(missing_ok=True)
