"""Saves in an object store behind the S3 protocol.

Below `s3://bucket/prefix/<run>` lie, per save,

    checkpoints/iter_000000120/<digest>/model/...     its files and its manifest, under the first digits of the manifest's digest
    checkpoints/iter_000000120/manifest.json          the same manifest, written last: from here on the save counts
    checkpoints/latest_checkpoint.txt                 the name of the save to resume from

so that a save of the same name is replaced by one small object, and a crash, or a store that dies midway, leaves what was there
before. Nothing is ever deleted but multipart uploads that did not finish. Credentials come from the environment alone.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from posttrain.checkpoint.layout import (
    AREAS,
    CACHE,
    CHECKPOINTS,
    LATEST,
    MANIFEST,
    OUTBOX,
    PARTIAL,
    iteration_of,
    iterations,
    put_in_place,
    recover,
)
from posttrain.checkpoint.manifest import FileRecord, Manifest, file_problem
from posttrain.checkpoint.store import make_parent
from posttrain.config.checkpoint import split_url
from posttrain.config.run import COMPONENTS
from posttrain.errors import CheckpointError

PART_BYTES = 64 * 2**20
"""Size of the parts of a multipart upload; S3 takes at most 10,000 of them."""
MOST_PARTS = 10_000
THREADS = 4
"""Parts on their way at once; each holds one in memory."""
ATTEMPTS = 5
"""Of one request, with growing delays between them."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 8.0
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10, 60

_BUSY = {"SlowDown", "RequestTimeout", "RequestTimeTooSkewed", "InternalError", "ServiceUnavailable", "Throttling", "BadDigest"}


class ObjectStore:
    """Implements `posttrain.checkpoint.store.ArtifactStore`, and takes copies of saves that stay where they are (`put`).

    Safe to use from several threads.
    """

    prunes = False

    def __init__(
        self,
        url: str,
        *,
        key: str,
        run_dir: Path,
        endpoint_url: str = "",
        part_bytes: int = PART_BYTES,
        first_delay_s: float = FIRST_DELAY_S,
    ) -> None:
        """
        Args:
            url: s3://bucket/prefix.
            key: the run's own name below it.
            run_dir: holds saves that are on their way, and the one that was fetched.
            endpoint_url: of the server; empty takes AWS_ENDPOINT_URL, else Amazon's.
            first_delay_s: before a request is repeated for the first time.
        """
        self._bucket, prefix = split_url(url)
        self._root = f"{prefix}/{key}".strip("/")
        self.place = f"s3://{self._bucket}/{self._root}"
        self._outbox, self._cache = run_dir / OUTBOX, run_dir / CACHE
        self._endpoint_url, self._part_bytes, self._first_delay_s = endpoint_url, part_bytes, first_delay_s
        self._stopped = threading.Event()
        self._client_lock = threading.Lock()
        self._made_client: Any = None

    # ---------------------------------------------------------------------------------------------------------- the protocol

    def scratch(self, area: str, name: str) -> Path:
        """See `ArtifactStore.scratch`."""
        path = self._outbox / area / (name + PARTIAL)
        make_parent(path)
        return path

    def commit(self, scratch: Path, area: str, name: str) -> None:
        """See `ArtifactStore.commit`. What cannot be delivered stays in the run directory, and `settle` delivers it."""
        waiting = self._outbox / area / name
        try:
            put_in_place(scratch, waiting)
        except OSError as error:
            raise CheckpointError(f"{waiting} was not saved: {error}") from error
        try:
            self._deliver(waiting, area)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; the save is whole in {waiting}, and the next start of this run uploads it") from error

    def names(self, area: str) -> list[str]:
        """See `ArtifactStore.names`."""
        start = f"{self._root}/{area}/"
        found: list[str] = []
        request: dict[str, Any] = {"Bucket": self._bucket, "Prefix": start, "Delimiter": "/"}
        while True:
            answer = self._ask(f"listing {self.place}/{area}", "list_objects_v2", **request)
            found += [entry["Prefix"][len(start) : -1] for entry in answer.get("CommonPrefixes", [])]
            if not answer.get("IsTruncated"):
                break
            request["ContinuationToken"] = answer["NextContinuationToken"]
        return sorted(n for n in found if iteration_of(n) is not None and self._head(f"{area}/{n}/{MANIFEST}") is not None)

    def manifest(self, area: str, name: str) -> Manifest:
        """See `ArtifactStore.manifest`."""
        return self._manifest(area, name)[0]

    def problems(self, area: str, name: str) -> list[str]:
        """See `ArtifactStore.problems`: sizes and, where the server keeps them, digests."""
        manifest, folder = self._manifest(area, name)
        found: list[str] = []
        for file, record in manifest.files.items():
            head = self._head(f"{folder}/{file}")
            if head is None:
                found.append(f"{self.place}/{folder}/{file} is missing")
            elif head["ContentLength"] != record.size:
                found.append(f"{self.place}/{folder}/{file} has {head['ContentLength']} bytes instead of {record.size}")
        return found

    def fetch(self, area: str, name: str, components: Sequence[str] | None = None) -> Path:
        """See `ArtifactStore.fetch`: into the run directory, where one save is kept; what is there already is not fetched again."""
        manifest, remote = self._manifest(area, name)
        folder = self._cache / name
        wanted = manifest.files_of(components)
        try:
            for other in iterations(self._cache):
                if other != folder:
                    shutil.rmtree(other)
            folder.mkdir(parents=True, exist_ok=True)
            missing = {file: record for file, record in wanted.items() if file_problem(folder / file, record) is not None}
            needed, free = sum(record.size for record in missing.values()), shutil.disk_usage(folder).free
            if free < needed:
                raise CheckpointError(f"{folder}: {free / 2**30:.2f} GiB are free and {needed / 2**30:.2f} GiB have to be fetched")
            (folder / MANIFEST).unlink(missing_ok=True)
            for file, record in missing.items():
                self._download(f"{remote}/{file}", folder / file, record)
            manifest.write(folder)
        except OSError as error:
            raise CheckpointError(f"{self.place}/{remote} cannot be kept in {folder}: {error}") from error
        return folder

    def latest(self) -> str | None:
        """See `ArtifactStore.latest`."""
        content = self._read(f"{CHECKPOINTS}/{LATEST}")
        return None if content is None else content.decode(errors="replace").strip()

    def settle(self) -> None:
        """See `ArtifactStore.settle`: deliver what an earlier attempt could not."""
        for area in AREAS:
            folder = self._outbox / area
            try:
                recover(folder)
            except OSError as error:
                raise CheckpointError(f"{folder}: what an earlier attempt left half written cannot be removed: {error}") from error
            for waiting in iterations(folder):
                problems = Manifest.read(waiting).problems(waiting)
                if problems:
                    raise CheckpointError(f"{'; '.join(problems[:3])}: it was not uploaded; remove {waiting} to go on without it")
                self._deliver(waiting, area)

    # ------------------------------------------------------------------------------------------------------------ an archive

    def check(self) -> None:
        """Raises CheckpointError when the bucket cannot be reached with the credentials at hand."""
        self._ask(f"reaching s3://{self._bucket}", "head_bucket", Bucket=self._bucket)

    def put(self, folder: Path, area: str, name: str) -> None:
        """Upload a save and verify what arrived; the folder stays. Files that are there already are not sent again."""
        try:
            content = (folder / MANIFEST).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{folder / MANIFEST} cannot be read ({error})") from error
        manifest = Manifest.parse(content, where=str(folder / MANIFEST))
        remote = _content_folder(area, name, content)
        self._abort_unfinished(remote)
        for file, record in manifest.files.items():
            self._upload(folder / file, f"{remote}/{file}", record)
        self._write(f"{remote}/{MANIFEST}", content)
        self._write(f"{area}/{name}/{MANIFEST}", content)

    def set_latest(self, name: str) -> None:
        """Name the save to resume from."""
        self._write(f"{CHECKPOINTS}/{LATEST}", f"{name}\n".encode())

    def stop(self) -> None:
        """Let requests in other threads fail at their next chance instead of being repeated."""
        self._stopped.set()

    # ---------------------------------------------------------------------------------------------------------------- inside

    def _deliver(self, waiting: Path, area: str) -> None:
        full = Manifest.read(waiting).components == COMPONENTS
        self.put(waiting, area, waiting.name)
        if full and area == CHECKPOINTS:
            self.set_latest(waiting.name)
        shutil.rmtree(waiting, ignore_errors=True)

    def _manifest(self, area: str, name: str) -> tuple[Manifest, str]:
        """The manifest of a save and the folder of its files."""
        where = f"{self.place}/{area}/{name}/{MANIFEST}"
        content = self._read(f"{area}/{name}/{MANIFEST}")
        if content is None:
            raise CheckpointError(f"{where} is missing: the save was never completed")
        return Manifest.parse(content, where=where), _content_folder(area, name, content)

    def _upload(self, path: Path, key: str, record: FileRecord) -> None:
        try:
            with path.open("rb") as file:
                if self._is_there(file.fileno(), key, record):
                    return
                expected = self._send(file.fileno(), key, record, where=str(path))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from error
        head = self._head(key)
        size = None if head is None else head["ContentLength"]
        if size != record.size:
            raise CheckpointError(f"{self.place}/{key} has {size} bytes after its upload instead of {record.size}")
        stored = head.get("ChecksumSHA256") if head is not None else None
        # servers without checksums, or with digests of parts of a form of their own, are read back
        if stored != expected and self._digest(key, record.size) != record.sha256:
            raise CheckpointError(f"{self.place}/{key} has another content after its upload than {path}")

    def _is_there(self, handle: int, key: str, record: FileRecord) -> bool:
        """Whether the server says that it holds this very file; one that keeps no checksums cannot."""
        head = self._head(key)
        if head is None or head["ContentLength"] != record.size or not head.get("ChecksumSHA256"):
            return False
        whole, digests = hashlib.sha256(), list[bytes]()
        for content in self._parts(handle, record.size):
            whole.update(content)
            digests.append(hashlib.sha256(content).digest())
        return whole.hexdigest() == record.sha256 and head["ChecksumSHA256"] == _checksum(digests)

    def _parts(self, handle: int, size: int) -> Iterator[bytes]:
        part_bytes = max(self._part_bytes, -(-size // MOST_PARTS))
        for offset in range(0, max(size, 1), part_bytes):
            yield os.pread(handle, min(part_bytes, size - offset), offset)

    def _send(self, handle: int, key: str, record: FileRecord, *, where: str) -> str:
        """Upload in one request or in parts; returns the checksum under which the server should file it."""
        what, target = f"uploading {where} to {self.place}/{key}", self._at(key)
        whole, digests = hashlib.sha256(), list[bytes]()
        count = max(1, -(-record.size // max(self._part_bytes, -(-record.size // MOST_PARTS))))

        def parts() -> Iterator[bytes]:
            for content in self._parts(handle, record.size):
                whole.update(content)
                digests.append(hashlib.sha256(content).digest())
                yield content

        def check() -> None:
            if whole.hexdigest() != record.sha256:
                raise CheckpointError(f"{where} has another content than was saved (SHA-256 differs): it was not uploaded")

        def send(number: int, content: bytes, digest: bytes) -> dict[str, Any]:
            checksum = base64.b64encode(digest).decode()
            answer = self._ask(
                f"{what}, part {number} of {count},", "upload_part", **target, PartNumber=number, Body=content, ChecksumSHA256=checksum
            )
            return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumSHA256": checksum}

        if count == 1:
            (content,) = parts()
            check()
            self._ask(what, "put_object", **target, Body=content, ChecksumSHA256=_checksum(digests))
            return _checksum(digests)
        target["UploadId"] = self._ask(what, "create_multipart_upload", **target, ChecksumAlgorithm="SHA256")["UploadId"]
        try:
            sent = list(_in_order((send, number, content, digests[-1]) for number, content in enumerate(parts(), 1)))
            check()
            self._ask(what, "complete_multipart_upload", **target, MultipartUpload={"Parts": sent})
        except BaseException:
            self._quietly("abort_multipart_upload", **target)
            raise
        return _checksum(digests)

    def _download(self, key: str, path: Path, record: FileRecord) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(path.name + ".part")
        digest = hashlib.sha256()
        with scratch.open("wb") as file:
            for block in self._blocks(key, record.size):
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != record.sha256:
            scratch.unlink()
            raise CheckpointError(f"{self.place}/{key} has another content than was saved (SHA-256 differs)")
        scratch.replace(path)

    def _digest(self, key: str, size: int) -> str:
        """By reading everything back, for servers that keep no checksum."""
        digest = hashlib.sha256()
        for block in self._blocks(key, size):
            digest.update(block)
        return digest.hexdigest()

    def _blocks(self, key: str, size: int) -> Iterator[bytes]:
        head = self._head(key)
        if head is None:
            raise CheckpointError(f"{self.place}/{key} is missing")
        if head["ContentLength"] != size:
            raise CheckpointError(f"{self.place}/{key} has {head['ContentLength']} bytes instead of {size}")

        def get(start: int) -> bytes:
            end = min(start + self._part_bytes, size)
            content = self._ask(f"fetching {self.place}/{key}", "get_object", body=True, **self._at(key), Range=f"bytes={start}-{end - 1}")
            if len(content) != end - start:
                raise CheckpointError(f"{self.place}/{key} has {start + len(content)} bytes or more, not {size}: it changed meanwhile")
            return content

        yield from _in_order((get, start) for start in range(0, size, self._part_bytes))

    def _read(self, key: str) -> bytes | None:
        """A small object; None when there is none."""
        return self._ask(f"reading {self.place}/{key}", "get_object", body=True, absent=None, **self._at(key))

    def _write(self, key: str, content: bytes) -> None:
        """A small object, read back."""
        checksum = _checksum([hashlib.sha256(content).digest()])
        self._ask(f"writing {self.place}/{key}", "put_object", **self._at(key), Body=content, ChecksumSHA256=checksum)
        if self._read(key) != content:
            raise CheckpointError(f"{self.place}/{key} has another content than was written")

    def _head(self, key: str) -> dict[str, Any] | None:
        return self._ask(f"looking at {self.place}/{key}", "head_object", absent=None, **self._at(key), ChecksumMode="ENABLED")

    def _at(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": f"{self._root}/{key}"}

    def _abort_unfinished(self, folder: str) -> None:
        """Free what an interrupted upload of the same save left with the server, which bills it until someone does."""
        found = self._quietly("list_multipart_uploads", Bucket=self._bucket, Prefix=f"{self._root}/{folder}/") or {}
        for upload in found.get("Uploads", []):
            self._quietly("abort_multipart_upload", Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def _quietly(self, method: str, **request: Any) -> Any:
        """One attempt at something the run does not depend on."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self._client(), method)(**request)
        except (BotoCoreError, ClientError):
            return None

    def _ask(self, what: str, method: str, *, body: bool = False, absent: Any = ..., **request: Any) -> Any:
        """One request, repeated while the server or the way to it fails.

        Args:
            body: return the content of the object.
            absent: return this when there is no such object, instead of raising.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        client = self._client()
        delay = self._first_delay_s
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = getattr(client, method)(**request)
                return answer["Body"].read() if body else answer
            except ClientError as error:
                status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
                code, text = (error.response.get("Error", {}).get(name, "") for name in ("Code", "Message"))
                if absent is not ... and code in ("404", "NoSuchKey"):
                    return absent
                cause, again = f"the server answered {status} {code}: {text}", status >= 500 or status == 429 or code in _BUSY
            except BotoCoreError as error:
                cause, again = f"{type(error).__name__}: {error}", isinstance(error, _transient())
            if not again or attempt == ATTEMPTS or self._stopped.is_set():
                tried = f" ({attempt} attempts)" if attempt > 1 else ""
                raise CheckpointError(f"{what} failed{tried}: {cause}{_hint(cause)}")
            self._stopped.wait(delay)
            delay = min(2 * delay, LONGEST_DELAY_S)
        raise AssertionError("unreachable")

    def _client(self) -> Any:
        with self._client_lock:  # making one is not safe in two threads, using one is
            if self._made_client is None:
                import boto3
                from botocore.config import Config

                config = Config(
                    connect_timeout=CONNECT_TIMEOUT_S,
                    read_timeout=READ_TIMEOUT_S,
                    max_pool_connections=2 * THREADS,
                    retries={"total_max_attempts": 1},  # they are repeated here, within one bound
                    request_checksum_calculation="when_required",  # many servers know no trailing checksums
                    response_checksum_validation="when_required",
                )
                self._made_client = boto3.Session().client("s3", endpoint_url=self._endpoint_url or None, config=config)
            return self._made_client


def _content_folder(area: str, name: str, manifest: bytes) -> str:
    return f"{area}/{name}/{hashlib.sha256(manifest).hexdigest()[:16]}"


def _in_order(calls: Iterator[tuple[Any, ...]]) -> Iterator[Any]:
    """Results of `(function, *arguments)` in order, with a few calls running ahead."""
    running: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for function, *arguments in calls:
                running.append(pool.submit(function, *arguments))
                if len(running) >= THREADS:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


def _transient() -> tuple[type[Exception], ...]:
    from botocore.exceptions import ConnectionError as AnyConnectionError
    from botocore.exceptions import HTTPClientError, IncompleteReadError

    return (AnyConnectionError, HTTPClientError, IncompleteReadError)


def _hint(cause: str) -> str:
    if "NoCredentials" in cause or "PartialCredentials" in cause:
        return "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    return ""


def _checksum(digests: Sequence[bytes]) -> str:
    """How S3 writes the SHA-256 of an object: its own, or the digest of its parts' digests and their number."""
    if len(digests) == 1:
        return base64.b64encode(digests[0]).decode()
    return f"{base64.b64encode(hashlib.sha256(b''.join(digests)).digest()).decode()}-{len(digests)}"
