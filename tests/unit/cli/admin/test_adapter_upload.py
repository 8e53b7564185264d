from pathlib import Path

import httpx
import pytest

from loraserve.cli.admin import adapter_upload
from loraserve.cli.admin.adapter_upload import MAX_TRIES, upload
from loraserve.cli.admin.client import REQUEST_ID, AdminClient, AdminError

OURS = {REQUEST_ID: "r"}

CHUNK = 4


class RestartingServer:
    """Drops `num_lost` requests in a row: from the second chunk of weights on (bytes are kept), or at the commit."""

    def __init__(self, num_lost: int, *, at_commit: bool = False) -> None:
        self.received = {"adapter_config.json": b"", "adapter_model.safetensors": b""}
        self._num_lost = num_lost
        self._at_commit = at_commit
        self._state = "uploading"

    def __call__(self, request: httpx.Request) -> httpx.Response:
        name = request.url.path.rpartition("/")[2]
        if request.method == "PUT":
            start = int(request.headers["content-range"].split()[1].partition("-")[0])
            assert start == len(self.received[name])
            self.received[name] += request.content
        is_weights = len(self.received["adapter_model.safetensors"]) > CHUNK
        if self._num_lost and (name == "commit" if self._at_commit else is_weights):
            self._num_lost -= 1
            raise httpx.ConnectError("refused")
        if request.method == "PUT":
            return httpx.Response(200, headers=OURS, json={"offset": len(self.received[name])})
        if name == "commit":
            self._state = "ready"
        files = [{"name": name, "offset": len(data)} for name, data in self.received.items()]
        return httpx.Response(
            200, headers=OURS, json={"id": "u1", "chunk_bytes": CHUNK, "state": self._state, "files": files}
        )


def send(server: RestartingServer, folder: Path) -> list[int]:
    """The progress reported to `on_sent`."""
    sent: list[int] = []
    with httpx.Client(transport=httpx.MockTransport(server), base_url="http://server") as http:
        upload(AdminClient(http), "sql", folder, activate=True, on_sent=sent.append, on_state=lambda _: None)
    return sent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(adapter_upload, "RETRY_S", 0)
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"0123456789")
    return tmp_path


@pytest.mark.parametrize("at_commit", [False, True], ids=["chunk", "commit"])
@pytest.mark.parametrize("num_lost", [0, 1, 2, MAX_TRIES - 1])
def test_an_upload_continues_at_the_offset_that_a_restarted_server_reports(
    folder: Path, num_lost: int, at_commit: bool
) -> None:
    server = RestartingServer(num_lost, at_commit=at_commit)
    assert send(server, folder)[-1] == 12
    assert server.received["adapter_model.safetensors"] == b"0123456789"


def test_an_upload_fails_if_the_server_does_not_come_back(folder: Path) -> None:
    with pytest.raises(AdminError, match="no server answers"):
        send(RestartingServer(MAX_TRIES), folder)


def test_a_folder_with_a_pickle_is_refused_with_advice_on_saving_it(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdminError, match=r"no adapter_model.safetensors: adapter_model.bin is a pickle, .*=True$"):
        send(RestartingServer(0), folder)
