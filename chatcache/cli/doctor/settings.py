"""What `chatcache serve` would meet with these settings: model, conversations, address, page."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from chatcache.chat.sqlite_schema import MIGRATIONS
from chatcache.chat.store import StoreUnavailable, StoreUnusable
from chatcache.cli.doctor.findings import Finding, bad, good, warning
from chatcache.cli.doctor.machine import room_on_disk
from chatcache.cli.doctor.store import keys_finding
from chatcache.cli.neighbour import taken
from chatcache.cli.server import listen
from chatcache.compose import check_model_folder, check_weight_files, has_tokenizer, served_name
from chatcache.config import EngineConfig, ServerConfig
from chatcache.errors import ModelFolderError
from chatcache.gateway.static import STATIC


def settings(engine: EngineConfig, server: ServerConfig) -> Iterator[Finding]:
    yield _model(engine)
    yield from _redis(server) if server.redis else _conversations(server)
    yield _address(server)
    if (STATIC / "index.html").is_file():
        yield good("Chat page", "built")
    else:
        yield warning("Chat page", "not built; the API works without it", "make web")


def _model(config: EngineConfig) -> Finding:
    name = served_name(config)
    if _is_id(config.model):
        return _fetched(config.model)
    try:
        check_model_folder(config)
        if not has_tokenizer(config):
            return bad("Model", f"{name}: no tokenizer", "add tokenizer.json from where the weights came from")
        check_weight_files(config)
    except ModelFolderError as error:
        return bad("Model", error.message, "MODEL is a folder with config.json and *.safetensors, or an id")
    return good("Model", name)


def _is_id(model: str) -> bool:
    return model.count("/") == 1 and model[0] not in "./~" and not Path(model).exists()


def _fetched(model: str) -> Finding:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return good("Model", f"{model}: fetched already, {snapshot_download(model, local_files_only=True)}")
    except LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE:
            return bad("Model", f"{model} is not on this machine, and HF_HUB_OFFLINE is set", "fetch it while online")
        return warning("Model", f"{model} is not on this machine yet", "the first start fetches it from the hub")
    except HFValidationError as error:
        return bad("Model", f"{model}: {error}", "an id is NAMESPACE/NAME")


def _redis(config: ServerConfig) -> Iterator[Finding]:
    """Look at a Redis server without changing it."""
    from chatcache.chat.redis_rights import look_around
    from chatcache.chat.store_redis import look_at
    from chatcache.cli.doctor.store import redis_findings

    what = "Conversations"
    try:
        look_at(config.redis)
        rights = look_around(config.redis)
    except StoreUnusable as error:
        yield bad(what, error.message, "see Stores in chatcache/gateway/README.md for the user it takes")
    except StoreUnavailable as error:
        yield warning(what, f"no Redis server yet: {error.message}", "chatcache serve waits for it")
    else:
        yield good(what, "in the Redis server of --redis")
        yield from redis_findings(rights)
        yield keys_finding(config, rights.num_keys)


def _conversations(config: ServerConfig) -> Iterator[Finding]:
    """Look at the database without changing it."""
    what, path = "Conversations", Path(config.db)
    folder = path.absolute().parent
    if not folder.is_dir():
        yield bad(what, f"there is no folder {folder}", "make it, or name another file with --db")
        return
    if not path.exists():
        yield good(what, f"{path} will be made")
        yield keys_finding(config, 0)
    else:
        yield _database(what, path)
        yield keys_finding(config, *_num_keys(path))
    # A newer version copies the file before it changes it, and so does a backup.
    yield room_on_disk("Disk", folder, path.stat().st_size if path.exists() else 0)


def _num_keys(path: Path) -> tuple[int, int]:
    """How many keys the file has, and how many of them are revoked; none where it cannot be read."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=2)) as db:
            num_keys, num_revoked = db.execute("SELECT count(*), count(revoked_at) FROM keys").fetchone()
            return num_keys, num_revoked
    except sqlite3.Error:  # which `_database` tells, or the file is of before there were keys
        return 0, 0


def _database(what: str, path: Path) -> Finding:
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=2)) as db:
            version: int = db.execute("PRAGMA user_version").fetchone()[0]
            if version > len(MIGRATIONS):
                return bad(
                    what, f"{path} is of a newer chatcache (schema {version})", "use that version, or another --db"
                )
            complaint: str = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if complaint != "ok":
                return bad(what, f"{path} is damaged: {complaint}", "restore a backup, or start with another --db")
            (num,) = db.execute("SELECT count(*) FROM conversations").fetchone() if version else (0,)
    except sqlite3.Error as error:
        return bad(what, f"{path}: {error}", "name a file of chatcache's own with --db")
    return good(what, f"{num} in {path}")


def _address(config: ServerConfig) -> Finding:
    where = f"{config.host}:{config.port}"
    try:
        listen(config.host, config.port).close()
    except OSError as error:
        found = taken(config.host, config.port, error)
        return (warning if found.is_ours else bad)("Address", f"{where}: {found.why}", found.remedy)
    return good("Address", f"{where} is free" if config.port else f"{config.host}, any free port")
