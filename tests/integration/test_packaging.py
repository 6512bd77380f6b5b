"""The wheel holds the four packages, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "fusion_flows": "flows",
    "fusion_tasks": "tasks",
    "fusion_dask": "fusion_dask",
    "fusion_storage": "storage",
}


def test_the_wheel_holds_exactly_the_packages(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    [wheel] = tmp_path.glob("fusion_dask-*-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {n for n in names if ".dist-info/" not in n}
    expected = {
        f"{package}/{path.relative_to(ROOT / folder / package)}"
        for package, folder in PACKAGES.items()
        for path in (ROOT / folder / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert code == expected
    assert {f"{package}/py.typed" for package in PACKAGES} <= code
    about = {n.split(".dist-info/")[1] for n in names if ".dist-info/" in n}
    assert {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"} == about
    [entry] = [n for n in names if n.endswith("entry_points.txt")]
    assert "fusion = fusion_flows.cli:main" in zipfile.ZipFile(wheel).read(entry).decode()
