"""Jobs in object storage and on file systems without locks: killed, resumed, and alone."""

import errno
import fcntl
import json
import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from specmm.jobs import journal, locks
from specmm.jobs.engines import run_job
from specmm.jobs.folder import Job, Limits, Spec, occupied
from specmm.jobs.items import read_items
from specmm.jobs.verify import verify
from specmm.loading.files import files_in, place, write_whole
from tests.commands import refused, run, succeed
from tests.flat import drawing, some


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server here, with a bucket called "bucket" and one to read only."""
    import boto3
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer(port=0, verbose=False)
    running.start()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    host, port = running.get_host_and_port()
    address = f"http://{host}:{port}"
    keys = dict(aws_access_key_id="any", aws_secret_access_key="any", region_name="us-east-1")
    client = boto3.client("s3", endpoint_url=address, **keys)
    for name in ("bucket", "readonly"):
        client.create_bucket(Bucket=name)
    denied = {"Effect": "Deny", "Principal": "*", "Action": "s3:PutObject"}
    rules = [{**denied, "Resource": "arn:aws:s3:::readonly/*"}]
    policy = json.dumps({"Version": "2012-10-17", "Statement": rules})
    client.put_bucket_policy(Bucket="readonly", Policy=policy)
    yield address
    running.stop()


@pytest.fixture
def s3(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An address in the bucket of its own."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    return f"s3://bucket/{tmp_path.name}"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases end soon."""
    monkeypatch.setattr(locks, "RENEWED", 0.5)  # seldom between two looks
    monkeypatch.setattr(locks, "ENDS", 1.5)
    monkeypatch.setattr(locks, "SETTLES", 0.2)


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system such as some NFS and FUSE."""
    fsync = os.fsync

    def no_folders(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    def no_locks(handle: int, mode: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(os, "fsync", no_folders)
    monkeypatch.setattr(fcntl, "flock", no_locks)


def made(address: str, fatal: str = "", layout: str = "folders") -> Any:
    """A job of nine items there, by a worker that may die; what it counted."""
    spec = Spec("pocket/llamagen", dtype="float32", layout=layout)
    job = Job(place(address), spec, Limits(batch=2, shard=4))
    return run_job(job, some(9), opener=drawing(fatal=fatal))[1]


def killed(address: str, layout: str = "folders") -> None:
    """A process that dies at the fifth item of the job."""
    process = multiprocessing.get_context("fork").Process(
        target=made, args=(address, "set/4", layout)
    )
    process.start()
    process.join()
    assert process.exitcode == 1


def contents(address: str) -> dict[str, bytes]:
    root = str(place(address)).rstrip("/")
    return {
        str(file).removeprefix(root): file.read_bytes()
        for part in ("results", "archives")
        for file in files_in(place(address) / part)
    }


@pytest.mark.parametrize("layout", ["folders", "tar"])
def test_a_job_at_an_address_is_killed_and_resumed(s3, quick, tmp_path, layout):
    """Every item once, with the bytes of a folder of this machine; what is damaged is repaired."""
    killed(s3, layout)
    assert made(s3, layout=layout).done == 5
    made(str(tmp_path / "here"), layout=layout)
    assert contents(s3) == contents(str(tmp_path / "here"))
    index = (place(s3) / "index.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in index] == [item.id for item in some(9)]
    assert verify(place(s3), some(9)).problems == []
    assert "9 of 9 items done" in succeed("batch", s3, "--status").stdout
    damaged = next(iter(files_in(place(s3) / ("results" if layout == "folders" else "archives"))))
    damaged.write_bytes(b"damaged")
    assert verify(place(s3), some(9)).problems
    job = Job(place(s3), Spec("pocket/llamagen", dtype="float32", layout=layout), Limits(shard=4))
    again = run_job(job, some(9), repair=True, opener=drawing())[0]
    assert again["repaired"] and not again["repaired_otherwise"]
    assert contents(s3) == contents(str(tmp_path / "here"))


def test_journals_of_many_objects(s3, monkeypatch):
    monkeypatch.setattr(journal, "PART", 1500)
    assert made(s3).done == 9
    assert len(list((place(s3) / "journal").glob("*.log"))) > 1
    assert made(s3).done == 0 and verify(place(s3), some(9)).problems == []


def test_a_folder_without_locks(without_locks, quick, tmp_path):
    """Also one whose process was killed: its leases end by themselves."""
    out = str(tmp_path / "out")
    killed(out)
    assert list((tmp_path / "out" / "journal").glob("*.lease"))
    assert made(out).done == 5
    assert verify(tmp_path / "out", some(9)).problems == []
    assert not list((tmp_path / "out" / "journal").glob("*.lease"))


@pytest.mark.parametrize("kind", ["s3", "without_locks", "tmp_path"])
def test_two_at_once(kind, quick, request, tmp_path):
    """The second one is told who works there; torchrun's processes share the folder."""
    found = request.getfixturevalue(kind)
    journals = place(str(found or tmp_path / "out")) / "journal"
    made(str(journals.parent))
    who = "" if kind == "tmp_path" else rf" \(process {os.getpid()} on "
    told = f"is being written by another process{who}"
    with occupied(journals), pytest.raises(ValueError, match=told), occupied(journals):
        pass
    with occupied(journals, "rank-0"), occupied(journals, "rank-1"):
        for second in ("", "rank-1"):
            with pytest.raises(ValueError, match=told), occupied(journals, second):
                pass
    with occupied(journals):
        pass


def test_a_lease_outlives_a_network_that_is_away(s3, quick, monkeypatch):
    """The library's own errors, which are no OSError, end no thread that renews it."""
    from botocore.exceptions import EndpointConnectionError

    renewed, away = threading.Event(), iter(range(2))

    def write(file: Path, data: bytes) -> None:
        if next(away, None) is not None:
            raise EndpointConnectionError(endpoint_url="http://away")
        write_whole(file, data)
        renewed.set()

    monkeypatch.setattr(locks, "write_whole", write)
    folder = place(s3)
    with occupied(folder / "journal"):
        assert renewed.wait(20)
    assert not list((folder / "journal").glob("*.lease"))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt", "parquet"])
def test_items_at_an_address(s3, kind):
    file = place(s3) / f"jobs.{kind}"
    if kind == "parquet":
        rows = pyarrow.Table.from_pylist([{"id": "a", "class": "heart"}])
        with file.open("wb") as stream:
            parquet.write_table(rows, stream)
    else:
        lines = {
            "jsonl": '{"id": "a", "class": "heart"}',
            "csv": "id,class\na,heart",
            "txt": "heart",
        }
        file.write_text(lines[kind] + "\n")
    assert [item.text for item in read_items(file)] == ["heart"]
    with pytest.raises(
        ValueError, match=f"JOBS must be a file, got {s3}/none.{kind}, which is not"
    ):
        read_items(file.with_name(f"none.{kind}"))


ADDRESSES = [
    ("s3://none/job", "cannot write to s3://none/job (The specified bucket does not exist)"),
    ("s3://readonly/job", "cannot write to s3://readonly/job (Forbidden)"),
    ("s3://", "s3:// must be a path, or an address such as s3://bucket/job, got: no bucket"),
    ("foo://bucket/job", "such as s3://bucket/job, got: Unsupported filesystem: 'foo'"),
]


@pytest.mark.parametrize(("address", "said"), ADDRESSES)
def test_addresses_that_cannot_be_used(address, said, s3, tmp_path):
    (tmp_path / "jobs.txt").write_text("1\n")
    words = ("batch", tmp_path / "jobs.txt", "--model", "pocket/llamagen", "--out", address)
    assert said in refused(*words)


def test_without_credentials(s3, tmp_path, monkeypatch):
    (tmp_path / "jobs.txt").write_text("1\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setattr("s3fs.S3FileSystem.clear_instance_cache", lambda: None)
    import s3fs

    s3fs.S3FileSystem._cache.clear()  # a client that knows the credentials
    words = ("batch", tmp_path / "jobs.txt", "--model", "pocket/llamagen", "--out", s3)
    assert "NoCredentialsError" in refused(*words)
    assert "NoCredentialsError" in refused("batch", f"{s3}/jobs.txt", *words[2:])
    assert run("batch", s3, "--status").exit_code == 2
