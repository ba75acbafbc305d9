"""What every test runs under: Triton's interpreter where there is no GPU, fixed seeds, no hub, one thread.

And what many ask for: the project's folders, a small model in one, the command line.
"""

import os
import tempfile

import torch

# Triton reads this when a kernel is decorated; set later it does nothing.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="flashbob-curv-cache-")  # no tile shapes tuned on this machine
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tensors here are tiny and `make test` runs one process per core: more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
NETWORK = os.environ.get("FLASHBOB_NETWORK") == "1"
if not NETWORK:
    # A test that reaches for the hub by mistake then fails at once, everywhere, instead of hanging somewhere.
    os.environ["HF_HUB_OFFLINE"] = "1"

import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from command_line import Run

ROOT = Path(__file__).resolve().parents[1]
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and say why."""
    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA device; this machine has none"
    if not NETWORK:
        reasons["network"] = "needs the network; set FLASHBOB_NETWORK=1 to run it"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Each test starts from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries under test may draw from the global state
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real models and texts beside the project; the test is skipped where it is absent."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the folder ../shared (real models and texts), which is not here")
    return folder


# Both import late: a test that does not ask for them needs neither the command line nor transformers.
@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model of `make_model`, one per test file."""
    from command_line import make_model

    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Run":
    """The command line in this process, started in the test's own folder."""
    from command_line import run_in_process

    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_in_process(capsys, *arguments)
