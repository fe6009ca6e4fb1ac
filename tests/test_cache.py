"""The cache of compiled programs: where it is, whose it is, and commands that do not notice what is wrong with it."""

import os
import re
import resource
import subprocess
import sys

import jax
import pytest
from helpers.internals import _cache

import sdeinfer as si

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)

PROGRAM = """
import jax, resource, sys
import sdeinfer as si
si.use_compilation_cache()
size = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
print(jax.jit(lambda x: 2 * x + 1)(3.0), events.count("/jax/compilation_cache/cache_hits"))
"""
"""Compiles a small program, and says how many were in the cache; a file may have so many bytes."""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's cache folder, and JAX as before the test at its end."""
    for name in ("SDEINFER_NO_CACHE", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def started(size: int = resource.RLIM_INFINITY) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(size)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def hits(process: subprocess.Popen) -> int:
    """How many programs were in the cache; the process ends well and says nothing on standard error."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert err == ""
    value, count = out.split()
    assert value == "7.0"
    return int(count)


def test_one_folder_for_each_jaxlib_and_cpu_that_only_the_user_may_write(home):
    folder = si.use_compilation_cache()
    assert folder is not None
    assert folder.parent == home / "sdeinfer"
    assert re.fullmatch(r"[0-9a-f]{12}", folder.name)
    assert {path.stat().st_mode & 0o777 for path in (folder, folder.parent)} == {0o700}
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    assert si.use_compilation_cache() == folder


@pytest.mark.parametrize(("name", "value"), [("SDEINFER_NO_CACHE", "1"), ("JAX_COMPILATION_CACHE_DIR", "elsewhere")])
def test_a_variable_leaves_jax_as_it_is(home, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert si.use_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None
    assert list(home.iterdir()) == []


def test_a_folder_that_jax_was_told_of_stays(home):
    jax.config.update("jax_compilation_cache_dir", str(home / "own"))
    assert si.use_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir == str(home / "own")


def test_folders_that_cannot_be_used_are_left_alone(home, monkeypatch):
    def unusable():
        return si.use_compilation_cache() is None and jax.config.jax_compilation_cache_dir is None

    (home / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "file" / "cache"))
    assert unusable()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    (home / "sdeinfer").mkdir(mode=0o700)
    (home / "sdeinfer").chmod(0o777)
    assert unusable()
    (home / "sdeinfer").chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert unusable()
    assert not list((home / "sdeinfer").glob("*/*"))
    assert not unusable()


def test_a_start_leaves_the_programs_used_last(home, monkeypatch):
    monkeypatch.setattr(_cache, "CACHE_BYTES", 10_000)
    folder = si.use_compilation_cache()
    assert folder is not None
    for age in range(10):
        file = folder / f"{age}-cache"
        file.write_bytes(bytes(2000))
        os.utime(file, (10_000 - age, 10_000 - age))
    jax.config.update("jax_compilation_cache_dir", None)
    assert si.use_compilation_cache() == folder
    assert {path.name for path in folder.iterdir()} == {f"{age}-cache" for age in range(5)}


@pytest.mark.long
def test_processes_share_programs_at_once_and_after_damage(home):
    """A program that is cut off on a full disk, or damaged, is compiled again without a word."""
    assert hits(started(size=100)) == 0
    (folder,) = (home / "sdeinfer").iterdir()
    for path in folder.iterdir():
        path.unlink()
    first, second = started(), started()
    hits(first), hits(second)
    programs = [path for path in folder.iterdir() if path.name.endswith("-cache")]
    assert programs
    assert hits(started()) == len(programs)
    for path in programs:
        path.write_bytes(path.read_bytes()[:-10])
    assert hits(started()) == 0
