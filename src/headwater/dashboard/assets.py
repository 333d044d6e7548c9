"""The page's own files, which are part of the package. They are read once, so nothing else can be served."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.core.errors import HeadwaterError
from headwater.dashboard.plain_values import encoded

FOLDER = Path(__file__).with_name("assets")
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml", ".png": "image/png", ".ico": "image/x-icon", ".woff2": "font/woff2",
    ".json": "application/json", ".txt": "text/plain; charset=utf-8", ".map": "application/json",
}  # fmt: skip
_SCRIPT = re.compile(r'<script\b[^>]*\bsrc="/?assets/([^"]+)"[^>]*>\s*</script>')
_STYLE = re.compile(r'<link\b[^>]*\bhref="/?assets/([^"]+\.css)"[^>]*/?>')
_LINK = re.compile(r'<link\b[^>]*\bhref="/?assets/([^"]+)"[^>]*/?>')


@dataclass(frozen=True)
class Asset:
    content: bytes
    content_type: str


class Assets:
    def __init__(self, folder: Path = FOLDER) -> None:
        self.files: Mapping[str, Asset] = {
            path.relative_to(folder).as_posix(): Asset(path.read_bytes(), _TYPES[path.suffix])
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.suffix in _TYPES
        }
        if INDEX not in self.files:
            raise HeadwaterError(
                f"{folder}: the page of the dashboard is missing; install Headwater again, or, in a clone, build it "
                "with `npm ci && npm run build` in ui/"
            )

    def with_data(self, answers: Mapping[str, Any]) -> str:
        """The page as one file that needs no server: scripts and styles inside, and the answers it would ask for."""
        page = self.files[INDEX].content.decode()
        hashes: list[str] = []

        def script(match: re.Match[str]) -> str:
            code = self._text(match[1]).replace("</script", "<\\/script")
            digest = hashlib.sha256(code.encode()).digest()
            hashes.append(f"'sha256-{base64.b64encode(digest).decode()}'")
            scripts.append(f"<script>{code}</script>")
            return ""

        scripts: list[str] = []
        page = _SCRIPT.sub(script, page)
        page = _STYLE.sub(lambda match: f"<style>{self._text(match[1])}</style>", page)
        page = _LINK.sub("", page)  # an icon, for example
        policy = (
            f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; "
            "img-src data: blob:; base-uri 'none'; form-action 'none'"
        )
        head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        page = re.sub(r"(<head\b[^>]*>)", lambda match: f"{match[1]}{head}", page, count=1)
        data = encoded(answers).decode()
        # In the data, no text can end the element that holds it, or begin a comment.
        data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
        holder = f'<script type="application/json" id="headwater-data">{data}</script>'
        end = page.rfind("</body>")
        return page[:end] + holder + "".join(scripts) + page[end:] if end >= 0 else page + holder + "".join(scripts)

    def _text(self, name: str) -> str:
        return self.files[name].content.decode() if name in self.files else ""
