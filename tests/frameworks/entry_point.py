# The package as `pip install` leaves it: torch finds the entry point by the metadata next to it.
# Writes two small files into a folder of the test's.
"""`site = install(tmp_path)` goes into PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

ENTRY = "[torch.backends]\nfarandole = farandole.autoload:register\n"


def install(folder: Path) -> Path:
    """A folder for PYTHONPATH in which torch finds the entry point."""
    metadata = folder / "site" / "farandole-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: farandole\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(ENTRY)
    return metadata.parent
