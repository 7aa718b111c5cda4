"""A stand-in of the Hugging Face hub: the part of its HTTP interface that uploads and downloads of a folder use.

Repositories live in memory. The token "right" may write; another one, or none, gets 401.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_right"


class Hub(ThreadingHTTPServer):
    """`with Hub() as hub: …`, serving at `hub.url`; `hub.repos["owner/name"]` maps paths to contents."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.commits: list[dict] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *error) -> None:
        self.shutdown()
        super().__exit__(*error)

    def sha(self, repo: str) -> str:
        return hashlib.sha1(repr(sorted(self.repos[repo].items())).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments) -> None:
        pass

    def answer(self, value=None, status: int = 200, body: bytes | None = None, **headers: str) -> None:
        body = json.dumps(value).encode() if body is None else body
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, code: str = "RepoNotFound") -> None:
        self.answer({"error": "not found"}, 404, X_Error_Code=code)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length")
        body = self.rfile.read(int(length)) if length else self.chunks()
        path = unquote(urlsplit(self.path).path)
        if path == "/api/validate-yaml":  # of a model card
            return self.answer({"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials"}, 401)
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'me'}/{wanted['name'].split('/')[-1]}"
            self.server.repos.setdefault(name, {})
            return self.answer({"url": f"{self.server.url}/{name}", "name": name})
        _, _, _, owner, name, action, *_ = path.split("/")
        repo = f"{owner}/{name}"
        if action == "preupload":
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        assert action == "commit", path
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "header":
                self.server.commits.append(entry["value"])
            if entry["key"] == "file":
                self.server.repos[repo][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        sha = self.server.sha(repo)
        return self.answer({"commitUrl": f"{self.server.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True})

    def chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        api = path.startswith("/api/models/")
        owner, name, *rest = path.removeprefix("/api/models/").removeprefix("/").split("/")
        repo = f"{owner}/{name}"
        if repo not in self.server.repos:
            return self.missing()
        files, sha = self.server.repos[repo], self.server.sha(repo)
        if api and rest[:1] == ["tree"]:
            entry = lambda path: {"type": "file", "path": path, "size": len(files[path]), "oid": etag(files[path])}
            return self.answer([entry(path) for path in files])
        if api:
            return self.answer({"id": repo, "sha": sha, "siblings": [{"rfilename": path} for path in files]})
        _, _, *parts = rest  # resolve/main/path
        if (file := "/".join(parts)) not in files:
            return self.missing("EntryNotFound")
        return self.answer(body=files[file], ETag=f'"{etag(files[file])}"', X_Repo_Commit=sha)

    do_HEAD = do_GET  # noqa: N815


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
