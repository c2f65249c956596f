"""Published files are downloaded on demand, and go on where they broke off."""

import hashlib
import http.server
import re
import threading

import pytest

import he_keras as he
from he_keras.registry import Registry
from he_keras.zoo import catalog
from he_keras.zoo.downloads import local_path

CONTENT = bytes(range(256)) * 20_000
QUIET = {"say": lambda line: None}


class Published(http.server.BaseHTTPRequestHandler):
    """Answers with a file or with parts of it; the server's settings say what goes wrong."""

    def do_GET(self):
        self.server.asked.append(self.headers["Range"])
        content = self.server.content
        start = 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        is_same = self.headers["If-Range"] in (None, self.server.version)
        if asked and is_same and self.server.takes_ranges:
            start = int(asked[1])
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Type", self.server.kind)
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", self.server.version)
        self.end_headers()
        self.wfile.write(content[start : start + self.server.sends])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """A server on loopback with the one entry, "trades/mine"."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Published) as server:
        server.content, server.version, server.kind = CONTENT, '"1"', "application/octet-stream"
        server.asked, server.sends, server.takes_ranges = [], len(CONTENT), True
        monkeypatch.setattr(catalog, "ENTRIES", Registry("entry"))
        monkeypatch.setattr("he_keras.zoo.downloads.ENTRIES", catalog.ENTRIES)
        publish(server, hashlib.sha256(CONTENT).hexdigest())
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def publish(server, digest):
    catalog.ENTRIES.clear()
    address = f"http://127.0.0.1:{server.server_port}/model.pt"
    catalog.ENTRIES["trades/mine"] = he.zoo.Entry(
        "trades/mine", address, "wide_resnet_10_1", "MIT", sha256=digest
    )


def test_file_is_downloaded_once(server, tmp_path):
    path = he.zoo.download("trades/mine", tmp_path, **QUIET)
    assert path == tmp_path / "trades" / "mine.pt" and path.read_bytes() == CONTENT
    assert he.zoo.download("trades/mine", tmp_path, **QUIET) == path
    assert server.asked == [None]
    assert [each.name for each in path.parent.iterdir()] == ["mine.pt"]


def test_download_goes_on_where_it_broke_off(server, tmp_path):
    server.sends = 1_500_000
    with pytest.raises(ValueError, match="1,500,000 of 5,120,000 bytes; the same command goes on"):
        he.zoo.download("trades/mine", tmp_path, **QUIET)
    assert not local_path(catalog.ENTRIES["trades/mine"], tmp_path).exists()
    server.sends = len(CONTENT)
    assert he.zoo.download("trades/mine", tmp_path, **QUIET).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1500000-"]


@pytest.mark.parametrize("reason", ["the file has changed", "no ranges"])
def test_download_begins_anew_where_it_cannot_go_on(reason, server, tmp_path):
    server.sends = 1_500_000
    with pytest.raises(ValueError):
        he.zoo.download("trades/mine", tmp_path, **QUIET)
    server.sends = len(CONTENT)
    if reason == "no ranges":
        server.takes_ranges = False
    else:
        server.version, server.content = '"2"', CONTENT[::-1]
        publish(server, hashlib.sha256(server.content).hexdigest())
    assert he.zoo.download("trades/mine", tmp_path, **QUIET).read_bytes() == server.content


def test_complete_part_is_taken(server, tmp_path):
    (tmp_path / "trades").mkdir()
    (tmp_path / "trades" / "mine.pt.part").write_bytes(CONTENT)
    assert he.zoo.download("trades/mine", tmp_path, **QUIET).read_bytes() == CONTENT
    assert server.asked == [f"bytes={len(CONTENT)}-"]


def test_wrong_file_is_deleted(server, tmp_path):
    publish(server, "0" * 64)
    with pytest.raises(ValueError, match="not the published one; expected SHA-256 0000"):
        he.zoo.download("trades/mine", tmp_path, **QUIET)
    assert not list((tmp_path / "trades").glob("*.pt*part"))


def test_a_page_is_not_the_file(server, tmp_path):
    server.kind = "text/html; charset=utf-8"
    with pytest.raises(ValueError, match="a page in place of the file: open http.*put the file at"):
        he.zoo.download("trades/mine", tmp_path, **QUIET)
    assert not list((tmp_path / "trades").iterdir())


def test_without_a_network_the_message_says_which_file_to_put_where(server, tmp_path, monkeypatch):
    address = "http://127.0.0.1:1/model.pt"
    catalog.ENTRIES.clear()
    catalog.ENTRIES["trades/mine"] = he.zoo.Entry("trades/mine", address, "wide_resnet_10_1", "MIT")
    with pytest.raises(ValueError, match=f"open {address} .* put the file at {tmp_path}") as error:
        he.zoo.download("trades/mine", tmp_path, **QUIET)
    assert "\n" not in str(error.value) and "Connection refused" in str(error.value)
    assert not list((tmp_path / "trades").iterdir())


def test_status_of_a_missing_file_is_told(server, tmp_path):
    server.sends, server.content = 0, b""
    (tmp_path / "trades").mkdir()
    (tmp_path / "trades" / "mine.pt.part").write_bytes(b"12")
    with pytest.raises(ValueError, match="received HTTP Error 416"):
        he.zoo.download("trades/mine", tmp_path, **QUIET)


def test_a_folder_of_files_is_fetched_by_hand(tmp_path):
    with pytest.raises(ValueError, match=r"a folder of files: open https://drive.*18.pt"):
        he.zoo.download("fast_adversarial/preact-resnet-18", tmp_path, **QUIET)
    assert not list(tmp_path.iterdir())


def test_addresses():
    entries = {entry.name: entry for entry in he.zoo.entries()}
    drive = entries["trades/wrn-34-10"]
    assert drive.page == "https://drive.google.com/file/d/10sHvaXhTNZGz618QmD5gSOAjO3rMzV33/view"
    assert drive.address.endswith("id=10sHvaXhTNZGz618QmD5gSOAjO3rMzV33")
    assert local_path(entries["deepmind/jax/mnist_linf_wrn28-10_without"]).suffix == ".npy"
    assert local_path(entries["madry/imagenet_linf_4"]).name == "imagenet_linf_4.pt"
    with pytest.raises(ValueError, match="Unknown entry; expected one of"):
        he.zoo.download("trades")
