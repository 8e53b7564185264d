"""What is stored of an adapter that also has tensors for a vision tower: a multimodal model and real uploads."""

import asyncio
from pathlib import Path

from loraserve_adapters.config import CONFIG_NAME
from loraserve_adapters.safetensors_file import WEIGHTS_NAME
from loraserve_adapters.source import read_adapter
from safetensors.torch import load_file

from loraserve.store.upload_session import UploadState
from tests.inference.test_multimodal_base import TARGETS, save_adapter
from tests.support.engines import make_engine
from tests.support.tiny_models import multimodal_config, random_model, save_model
from tests.support.uploads import UploadBench


def test_stored_adapters_have_no_tower_tensors_and_can_be_uploaded_again(tmp_path: Path) -> None:
    model, folder = random_model(multimodal_config()), tmp_path / "plain"
    save_model(model, tmp_path / "model")
    save_adapter(model, TARGETS["plain"], folder)
    layout = make_engine(tmp_path / "model").describe().layout
    kept: list[dict[str, bytes]] = []
    uploaded = {name: (folder / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME)}
    for number in range(2):
        bench = UploadBench(tmp_path / f"data{number}", layout=layout)
        session = asyncio.run(bench.send(uploaded))
        assert session.state is UploadState.READY, session.report
        (digest,) = bench.contents()
        blob = bench.blobs.folder(digest)
        assert blob is not None
        assert read_adapter(folder, layout).digest == read_adapter(blob, layout).digest == digest
        tensors = load_file(blob / WEIGHTS_NAME)
        assert tensors.keys() == {name for name in load_file(folder / WEIGHTS_NAME) if "vision_tower" not in name}
        asyncio.run(bench.ingest.pack(digest, blob))
        kept.append({path.name: path.read_bytes() for path in blob.iterdir()})
        uploaded = {name: (blob / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME)}
    # The stored files are the same whether or not the uploaded file has tower tensors.
    assert kept[0] == kept[1]
