"""`fedsim data` tells the truth about files on disk, fetches an archive, and says what to do where it cannot."""

import dataclasses
import functools
import struct
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedsim.app.cli import main
from fedsim.app.commands import data
from fedsim.app.config import groups
from fedsim.data.datasets import Adult
from fedsim.data.datasets.data_files import Files


@pytest.fixture(name="fedsim")
def fedsim_fixture(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["fedsim", "data", *arguments])
        main()
        return capsys.readouterr().out

    return call


@pytest.fixture(name="site")
def site_fixture(tmp_path: Path) -> Iterator[str]:
    """A web server on this machine for the files of tmp_path."""
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(quiet, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def write_mnist(root: Path) -> None:
    """A tiny MNIST in the published format."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for half, n in (("train", 10), ("t10k", 5)):
        pixels, labels = np.zeros((n, 28, 28), np.uint8), (np.arange(n) % 10).astype(np.uint8)
        (folder / f"{half}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, n, 28, 28) + pixels.tobytes())
        (folder / f"{half}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, n) + labels.tobytes())


def states(text: str) -> dict[str, str]:
    return {words[0]: words[1] for line in text.splitlines() if line.startswith("  ") and (words := line.split())}


def test_the_list_says_of_every_data_set_whether_it_is_there(fedsim, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    listed = states(fedsim("--root", str(tmp_path)))
    assert set(listed) == set(groups()["dataset"]) - {"custom"}
    assert listed["mnist"] == "found"
    assert listed["digits"] == listed["synthetic"] == "ready"
    assert listed["text"] == listed["table"] == "your"  # files
    assert listed["fashion_mnist"] == listed["adult"] == "missing"


def test_a_data_set_that_is_there_is_read_as_a_check(fedsim, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    assert "10 training samples of shape [1, 28, 28], 5 test samples" in fedsim("mnist", "--root", str(tmp_path))
    (tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(b"rubbish")
    with pytest.raises(SystemExit, match=r"fedsim data: dataset=mnist: no usable files"):
        fedsim("mnist", "--root", str(tmp_path))


def test_what_cannot_be_fetched_says_what_to_do(fedsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(Files, "fetch", no_network)
    with pytest.raises(SystemExit, match=r"adult could not be fetched \(no route to host\).*adult/adult\.data"):
        fedsim("adult", "--root", str(tmp_path))
    with pytest.raises(SystemExit, match=r"cannot be fetched without a login; put .*cs-training\.csv from www\.kaggle"):
        fedsim("give_me_some_credit", "--root", str(tmp_path))
    with pytest.raises(SystemExit, match=r"NAME='mnst' is unknown.*did you mean 'mnist'\?"):
        fedsim("mnst")


def test_an_archive_is_fetched_unpacked_where_it_belongs_and_not_kept(
    fedsim, site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ", ".join(["39", "x", "1", "x", "13", "x", "x", "x", "x", "x", "0", "0", "40", "x"])
    other = ", ".join(["20", "x", "1", "x", "9", "x", "x", "x", "x", "x", "5", "1", "20", "x"])
    table = "\n".join([f"{row}, >50K", f"{other}, <=50K"] * 3)
    with zipfile.ZipFile(tmp_path / "adult.zip", "w") as archive:
        archive.writestr("adult.data", table)
        archive.writestr("adult.test", table)
    published = dataclasses.replace(Adult.files, url=f"{site}/adult.zip")
    monkeypatch.setattr(Adult, "files", published)
    monkeypatch.setattr(Adult, "counts", ((6, 3), (6, 3)))
    root = tmp_path / "root"
    assert "6 training samples of shape [4], 6 test samples" in fedsim("adult", "--root", str(root))
    assert sorted(path.name for path in (root / "adult").iterdir()) == ["adult.data", "adult.test"]


def test_every_data_set_with_files_says_where_they_come_from() -> None:
    for name, kind in data.datasets().items():
        if kind.files is not None:
            assert kind.files.remedy(name)
            assert kind.files.source
            assert "://" not in kind.files.source.split()[0]
            assert kind.files.url is None or kind.files.url.startswith(("https://", "http://"))
            assert not kind.files.existing_paths(Path("nowhere"))
