"""A Hub on this machine: the endpoints that pushing and loading need, over HTTP, with what was pushed kept in memory."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LICENSES = (
    "apache-2.0",
    "mit",
    "gpl-3.0",
    "cc-by-4.0",
    "llama3",
    "other",
    "unknown",
)  # of the Hub's list, what tests use
RELATIONS = ("adapter", "merge", "quantized", "finetune")


class LocalHub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, content=b"", status=200, **headers):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def missing(self, what):
        self.reply({"error": f"{what} not found"}, 404, X_Error_Code=f"{what}NotFound")

    def commits(self, repo, revision):
        """The repository's branches by name, and the commit that a revision names, if there is one."""
        branches = self.server.repos.get(repo)
        commit = branches and (branches.get(revision) or self.server.history.get(revision))
        return branches, commit

    def do_GET(self):
        path = self.path.partition("?")[0].replace("%2F", "/")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            branches, commit = self.commits(match[1], match[2] or "main")
            if branches is None or commit is None:
                return self.missing("Repo" if branches is None else "Revision")
            siblings = [{"rfilename": name} for name in commit["files"]]
            return self.reply(
                {"id": match[1], "sha": commit["sha"], "siblings": siblings, "private": False, "tags": []}
            )
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?(.*)", path):
            branches, commit = self.commits(match[1], match[2])
            if commit is None:
                return self.missing("Repo" if branches is None else "Revision")
            inside = {name: data for name, data in commit["files"].items() if name.startswith(match[3])}
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": oid(data)} for name, data in inside.items()
            ]
            return self.reply(rows)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+|refs/pr/\d+)/(.+)", path):
            branches, commit = self.commits(match[1], match[2])
            if commit is None:
                return self.missing("Repo" if branches is None else "Revision")
            if match[3] not in commit["files"]:
                return self.reply(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit["sha"])
            data = commit["files"][match[3]]
            return self.reply(data, ETag=f'"{oid(data)}"', X_Repo_Commit=commit["sha"])
        self.server.unknown.append(f"{self.command} {self.path}")
        self.missing("Entry")

    do_HEAD = do_GET

    def do_POST(self):
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        body = self.read_chunks() if chunked else self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            name = json.loads(body)["name"]
            repo = f"{json.loads(body).get('organization') or 'me'}/{name}"
            status = 409 if repo in self.server.repos else 200
            self.server.repos.setdefault(repo, {"main": self.server.commit({}, None)})
            return self.reply({"url": f"{self.server.endpoint}/{repo}", "name": repo}, status)
        if path == "/api/validate-yaml":
            errors = check_metadata(json.loads(body)["content"])
            return self.reply(json.dumps({"errors": errors}).encode(), 400 if errors else 200)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|branch|commit)/(.+)", path):
            repo, verb, revision = match.groups()
            branches, commit = self.commits(repo, "main" if verb == "branch" else revision)
            if commit is None:
                return self.missing("Repo" if branches is None else "Revision")
            if verb == "preupload":
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                return self.reply({"files": files})
            if verb == "branch":
                return (
                    self.reply(b"", 409)
                    if revision in branches
                    else (branches.update({revision: commit}), self.reply(b"{}"))[1]
                )
            files = dict(commit["files"])
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    header = line["value"]
                elif line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            if "create_pr=1" in self.path:
                revision = f"refs/pr/{len(branches)}"
            new = branches[revision] = self.server.commit(files, header)
            urls = {
                "commitUrl": f"{self.server.endpoint}/{repo}/commit/{new['sha']}",
                "commitOid": new["sha"],
                "success": True,
            }
            if revision.startswith("refs/pr"):
                urls["pullRequestUrl"] = f"{self.server.endpoint}/{repo}/discussions/{revision.rpartition('/')[2]}"
            return self.reply(urls)
        self.server.unknown.append(f"{self.command} {self.path}")
        self.missing("Entry")

    def read_chunks(self):
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), LocalHub)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.repos, self.history, self.unknown = {}, {}, []

    def commit(self, files, header):
        sha = hashlib.sha1(f"{len(self.history)}".encode()).hexdigest()
        self.history[sha] = {"sha": sha, "files": files, "header": header}
        return self.history[sha]


def oid(data: bytes) -> str:
    """What git calls a blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def check_metadata(content: str) -> list[str]:
    """What the Hub's documentation asks of the metadata of a model card, as far as it can be told offline."""
    import yaml
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    match = REGEX_YAML_BLOCK.search(content)
    data = yaml.safe_load(match[2]) if match else None
    if not isinstance(data, dict):
        return ["no metadata"]
    repo_id = r"[\w.-]+(/[\w.-]+)?"
    rules = {
        "license": data.get("license", "mit") in LICENSES,
        "base_model": re.fullmatch(repo_id, data.get("base_model", "a/b")) is not None,
        "base_model_relation": data.get("base_model_relation", "finetune") in RELATIONS,
        "tags": isinstance(data.get("tags", []), list) and all(isinstance(tag, str) for tag in data.get("tags", [])),
        "language": all(
            re.fullmatch(r"[a-z]{2,3}|code|multilingual", one)
            for one in [data.get("language", "en")]
            if isinstance(one, str)
        ),
        "pipeline_tag": re.fullmatch(r"[a-z0-9-]+", data.get("pipeline_tag", "other")) is not None,
        "library_name": isinstance(data.get("library_name", ""), str),
    }
    for entry in data.get("model-index", []):
        rules["model-index.name"] = isinstance(entry.get("name"), str)
        for result in entry.get("results", []):
            rules["model-index.task"] = isinstance(result["task"].get("type"), str)
            rules["model-index.dataset"] = all(isinstance(result["dataset"].get(key), str) for key in ("type", "name"))
            rules["model-index.metrics"] = all("type" in metric and "value" in metric for metric in result["metrics"])
    return [f'"{name}" is not valid' for name, valid in rules.items() if not valid]


@contextmanager
def local_hub():
    """A running server; `endpoint` is its address, `repos` what it holds, `unknown` what it was asked in vain."""
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
