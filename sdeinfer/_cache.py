"""JAX's persistent compilation cache, in the user's cache folder."""

import hashlib
import os
import platform
import shutil
import sys
import time
import warnings
import zlib
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import jax
import platformdirs

LARGEST = 2**26
"""Largest size in bytes of the cache after a start; hundreds of programs take 3 MB."""

UNUSED_DAYS = 90
"""Days without a start after which the programs of another jaxlib or CPU are removed."""

ZSTD = b"\x28\xb5\x2f\xfd"
"""First bytes of a program that JAX compressed with Zstandard; JAX uses zlib if Zstandard is not installed."""

LAST_START = ".last-start"
"""Name of the file whose modification time is the time of the last start."""

# JAX can bound its cache itself, but then examines every file before each write, 70 µs per file, and waits up to 10 s
# for a lock on every read and write. Without a bound it takes no lock: a program that another process has written only
# in part is compiled again.


def use_compilation_cache() -> Path | None:
    """Keep compiled programs in the user's cache folder, and load those that were compiled before.

    For applications and notebooks, before the first computation: it changes JAX's process-wide configuration. The
    folder is `sdeinfer` in the user's cache folder ($XDG_CACHE_HOME or ~/.cache on Linux), with one subfolder per
    jaxlib and CPU. Cached programs are executed, so only the user may write to the folder. Errors of the cache are
    silent; a program that cannot be read or written is compiled.

    Returns:
        The folder. None if SDEINFER_NO_CACHE=1, if JAX already has another folder, as by JAX_COMPILATION_CACHE_DIR, or
        if the folder cannot be used.
    """
    if os.environ.get("SDEINFER_NO_CACHE", "") not in ("", "0") or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return None
    try:
        folder = Path(platformdirs.user_cache_dir("sdeinfer", appauthor=False))
    except RuntimeError:  # the user has no home
        return None
    folder /= f"jaxlib-{version('jaxlib')}-{_cpu()}"
    known = jax.config.jax_compilation_cache_dir
    if known is not None:
        return folder if known == str(folder) else None
    try:
        if not _is_ours(folder):
            return None
        with suppress(FileNotFoundError):  # another process removes the same files
            _tidy(folder)
    except OSError:
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
    """Make the folder, and return whether only the user may write there and there is enough space."""
    if not folder.is_absolute():  # the user has no home
        return False
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
        status = each.stat()
        if sys.platform != "win32" and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
            return False
    return shutil.disk_usage(folder).free > LARGEST


def _tidy(folder: Path) -> None:
    """Remove damaged programs, the least recently used ones beyond `LARGEST`, and unused folders."""
    last_start = folder / LAST_START
    before = last_start.stat().st_mtime if last_start.exists() else 0.0
    last_start.touch()
    with os.scandir(folder) as entries:
        files = [(Path(entry.path), entry.stat()) for entry in entries if entry.is_file()]
    size = 0
    for file, status in sorted(files, key=lambda each: max(each[1].st_atime, each[1].st_mtime), reverse=True):
        size += status.st_size
        new = status.st_mtime >= before - 2  # file systems round times, by up to two seconds
        if file != last_start and (size > LARGEST or (new and _is_damaged(file))):
            file.unlink(missing_ok=True)
    for other in folder.parent.glob(f"*/{LAST_START}"):
        if other.stat().st_mtime < time.time() - UNUSED_DAYS * 86400:
            shutil.rmtree(other.parent, ignore_errors=True)


def _is_damaged(file: Path) -> bool:
    """Whether a program was written only in part, as on a full disk: JAX would fail to read it at every start."""
    content = file.read_bytes()
    if content.startswith(ZSTD):  # cannot be checked without Zstandard
        return False
    try:
        zlib.decompress(content)
    except zlib.error:
        return True
    return False
