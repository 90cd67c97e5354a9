"""A small run file and cluster profiles, as they are loaded, for tests of plans and job scripts."""

import os
from pathlib import Path

import numpy as np
import yaml

from scaling_slurm.core.data.token_file import TokenFileWriter
from scaling_slurm.launch.plan import JobPlan, plan
from scaling_slurm.settings import Loaded, load_settings
from scaling_slurm.slurm.cluster import ClusterProfile, load_cluster
from scaling_slurm.transformer.config import RunConfig

LAB = Path(__file__).parent.parent / "data" / "clusters" / "lab.yaml"

RUN = {
    "name": "small",
    "allocation": {"nodes": 2, "tasks_per_node": 2, "time": "1:00:00"},
    "model": {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "sequence_length": 8,
    },
    "data": {"train": "data/train"},
    "trainer": {"num_steps": 10, "global_batch_size": 16},
}


def write_run(folder: Path) -> Path:
    """A run file and its token files, of 64 tokens, in a folder."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    with TokenFileWriter(folder / "data" / "train", np.uint16, overwrite=True) as writer:
        writer.add_document(np.arange(64, dtype=np.uint16))
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(RUN | {"data": {"train": str(folder / "data" / "train")}}))
    return path


def load_run(folder: Path, *overrides: str) -> Loaded[RunConfig]:
    """The run of write_run with some settings changed."""
    return load_settings(RunConfig, write_run(folder), overrides=overrides)


def write_cluster(folder: Path, **settings: object) -> Loaded[ClusterProfile]:
    """A profile with some settings, the rest as by default."""
    path = folder / "site.yaml"
    path.write_text(
        yaml.safe_dump({"name": "site", "description": "A site", "verified": "no"} | settings, sort_keys=False)
    )
    return load_cluster(str(path))


def plan_in(folder: Path, cluster: Loaded[ClusterProfile] | None = None, *overrides: str, **options: object) -> JobPlan:
    """A plan for the run in a folder that need not exist; without a cluster, for the tests' own Slurm."""
    settings = {"runs_root": folder / "runs", "environ": {}} | options
    return plan(load_run(folder, *overrides), cluster or load_cluster(os.fspath(LAB)), **settings)  # type: ignore[arg-type]
