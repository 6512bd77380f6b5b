"""What `fusion simulate` of a shape does not import."""

import subprocess
import sys

CODE = """
import sys
from fusion_flows.cli import main
try:
    main(["simulate", "--model", "gpt2", "--pool", "rtx3080", "--microbatches", "2", "--hours", "1"])
except SystemExit as ended:
    assert not ended.code, ended.code
heavy = {"torch", "transformers", "distributed", "dask", "prefect", "matplotlib"} & set(sys.modules)
sys.exit(", ".join(sorted(heavy)) or 0)
"""


def test_a_shape_needs_neither_torch_nor_dask() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "tokens/s" in done.stdout
