from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
import xxhash
from torch import Tensor

from scaling_slurm.core.checkpoint import tensor_file
from scaling_slurm.core.checkpoint.manifest import ITEM_BYTES
from scaling_slurm.core.checkpoint.tensor_file import DTYPE_NAMES, describe, write_file


def tensors() -> dict[str, Tensor]:
    backing = torch.arange(3000.0).reshape(50, 60)
    return {
        "weight/half": torch.arange(3, dtype=torch.bfloat16) / 3,  # odd: what follows it would not be aligned
        "weight/float16": torch.tensor([1.5, float("nan")], dtype=torch.float16),
        "weight/double": torch.rand(5, 3, dtype=torch.float64),
        "weight/scalar": torch.tensor(2.5),
        "weight/empty": torch.empty(0, 4),
        "weight/view": backing[3:5],
        "weight/transposed": backing.t(),
        "weight/strided": backing[::7, 1::2],
        "weight/expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "weight/parameter": torch.nn.Parameter(torch.rand(2, 3, 4)),
    }


@pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 25])
def test_the_library_reads_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr(tensor_file, "_PIECE_BYTES", piece_bytes)
    path, saved = tmp_path / "f.safetensors", tensors()
    header, entries = describe(path.name, saved)
    record = write_file(path, header, [saved[entry.key] for entry in entries])
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == {key.removeprefix("weight/") for key in saved}
    for key, tensor in saved.items():
        found = loaded[key.removeprefix("weight/")]
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert torch.equal(found.nan_to_num(), tensor.nan_to_num()), key
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_slice("view")[1:, :2].tolist() == [[240.0, 241.0]]
    data = path.read_bytes()
    assert (record.bytes, record.xxh3_128) == (len(data), xxhash.xxh3_128(data).hexdigest())
    for entry in entries:
        tensor = saved[entry.key].detach().contiguous()
        assert data[entry.offset :][: entry.num_bytes] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert entry.offset % tensor.itemsize == 0


def test_a_view_does_not_write_what_it_is_a_view_of(tmp_path: Path) -> None:
    view = torch.zeros(1000, 1000)[:1]
    header, _ = describe("f", {"weight/w": view})
    assert write_file(tmp_path / "f", header, [view]).bytes == len(header) + 4000


def test_a_file_of_nothing_is_valid(tmp_path: Path) -> None:
    header, entries = describe("f", {})
    write_file(tmp_path / "f", header, [])
    assert entries == []
    assert safetensors.torch.load_file(tmp_path / "f") == {}


def test_both_tables_of_dtypes_agree() -> None:
    assert {name: dtype.itemsize for dtype, (name, _) in DTYPE_NAMES.items()} == ITEM_BYTES
