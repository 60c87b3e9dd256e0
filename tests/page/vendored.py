"""Fetches the page's libraries again: `python -m tests.page.vendored`, after a version in
`gateway/web/page/vendor/manifest.json` was changed.

The manifest names the npm package, version and path of each file, and its SHA-256.
"""

import hashlib
import json
import subprocess
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

VENDOR = Path(__file__).parents[2] / "gateway" / "web" / "page" / "vendor"
MANIFEST = VENDOR / "manifest.json"


def sha256(content: bytes) -> str:
    """The digest of a file, as in the manifest."""
    return hashlib.sha256(content).hexdigest()


def main() -> None:
    """Write each file and its digest."""
    manifest: dict[str, dict[str, str]] = json.loads(MANIFEST.read_text())
    archives: dict[str, bytes] = {}
    for name, entry in manifest.items():
        package = f"{entry['package']}@{entry['version']}"
        if package not in archives:
            archives[package] = _archive(package)
        content = _member(archives[package], f"package/{entry['path']}")
        (VENDOR / name).parent.mkdir(exist_ok=True)
        (VENDOR / name).write_bytes(content)
        entry["sha256"] = sha256(content)
    MANIFEST.write_text(json.dumps(manifest, indent=1) + "\n")


def _archive(package: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        pack = ["npm", "pack", "--silent", "--pack-destination", folder, package]
        subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
        (path,) = Path(folder).iterdir()
        return path.read_bytes()


def _member(archive: bytes, path: str) -> bytes:
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        member = files.extractfile(path)
        assert member is not None, path
        return member.read()


if __name__ == "__main__":
    main()
