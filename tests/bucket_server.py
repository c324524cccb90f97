"""A server of a bucket on this machine: what gcsfs, TensorStore and s3fs use of gs:// and s3://.

An object is visible once its last byte has arrived, and each write gives it a new generation.
In gs:// conditions of reads and writes on the generation fail as in the real store.
"""

import asyncio
import contextlib
import itertools
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from aiohttp import web  # which comes with gcsfs and s3fs
from aiohttp.test_utils import TestServer

_TIME = "2026-01-01T00:00:00.000Z"


@contextlib.contextmanager
def serve() -> Iterator["Bucket"]:
  bucket, loop = Bucket(), asyncio.new_event_loop()
  app = web.Application(client_max_size=2**30)
  app.router.add_route("*", "/{path:.*}", bucket.answer)
  thread = threading.Thread(target=loop.run_forever, daemon=True)
  thread.start()
  wait_for = lambda coroutine: asyncio.run_coroutine_threadsafe(
    coroutine, loop
  ).result()
  server = TestServer(app)
  wait_for(server.start_server())
  bucket.url = f"http://127.0.0.1:{server.port}"
  yield bucket
  wait_for(server.close())
  loop.call_soon_threadsafe(loop.stop)
  thread.join()
  loop.close()


class Bucket:
  """Holds gs://bucket and s3://bucket, which are one: both have the same objects.

  In s3:// `refuse` may return a status for a method and a name.
  """

  def __init__(self):
    self.objects: dict[str, tuple[int, bytes]] = {}
    self.generations = itertools.count(1)
    self.refuse = lambda method, name: 0

  @property
  def env(self) -> dict[str, str]:
    """The variables that lead gcsfs, google-cloud-storage, TensorStore and s3fs to this server."""
    return dict(
      STORAGE_EMULATOR_HOST=self.url,
      TENSORSTORE_GCS_HTTP_URL=self.url,
      GOOGLE_AUTH_TOKEN_FOR_TESTING="token",
      GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",
      AWS_ENDPOINT_URL=self.url,
      AWS_ACCESS_KEY_ID="key",
      AWS_SECRET_ACCESS_KEY="secret",
      AWS_DEFAULT_REGION="us-east-1",
      NO_PROXY="127.0.0.1",
    )

  def names(self, folder: str = "") -> list[str]:
    return sorted(
      name.removeprefix(folder) for name in self.objects if name.startswith(folder)
    )

  async def answer(self, request: web.Request) -> web.Response:
    path, body = request.path.replace("//", "/"), await request.read()
    if found := re.match(
      r"(?:/upload|/download)?/storage/v1/b/([^/]+)(/o(?:/(.*))?)?", path
    ):
      bucket, is_object, name = found.groups("")
      if bucket != "bucket":
        return web.json_response(
          dict(error=dict(message="The bucket does not exist")), status=404
        )
      if not is_object:
        return web.json_response(dict(name="bucket", kind="storage#bucket"))
      return self.answer_gs(request, name or request.query.get("name", ""), body)
    _, bucket, *name = path.split("/", 2)
    if bucket != "bucket":
      return _xml(
        404, Error=dict(Code="NoSuchBucket", Message="The bucket does not exist")
      )
    if status := self.refuse(request.method, "".join(name)):
      return _xml(status, Error=dict(Code="AccessDenied", Message="refused"))
    return self.answer_s3(request, "".join(name), body)

  def answer_gs(self, request: web.Request, name: str, body: bytes) -> web.Response:
    query, failed = (
      request.query,
      lambda status: web.json_response(dict(error={}), status=status),
    )
    generation, _ = self.objects.get(name, (0, b""))
    if query.get("ifGenerationMatch", str(generation)) != str(generation):
      return failed(412)
    if query.get("ifGenerationNotMatch") == str(generation):
      return web.Response(status=304)
    if request.path.startswith("/upload"):
      return self.upload(request, name, body)
    if found := re.fullmatch("(.*)/rewriteTo/b/bucket/o/(.*)", name):
      resource = self.put(found[2], self.objects[found[1]][1])
      return web.json_response(dict(done=True, resource=resource))
    if not name:
      return web.json_response(self.listing(query))
    if not generation:
      return failed(404)
    if request.method == "DELETE":
      del self.objects[name]
      return web.Response(status=204)
    if query.get("alt") == "media":
      return self.download(request, name)
    return web.json_response(self.resource(name))

  def upload(self, request: web.Request, name: str, body: bytes) -> web.Response:
    kind = request.query["uploadType"]
    if kind == "resumable" and "upload_id" not in request.query:  # then comes one chunk
      name = urllib.parse.quote(name or json.loads(body)["name"], safe="")
      url = f"{self.url}{request.path}?uploadType=resumable&name={name}&upload_id=1"
      return web.Response(headers=dict(Location=url))
    if kind == "multipart":
      boundary = re.search('boundary="?([^";]+)', request.headers["Content-Type"])[
        1
      ].encode()
      _, *parts, _ = re.split(b"\r?\n?--" + re.escape(boundary), body)
      metadata, body = (re.split(b"\r?\n\r?\n", part, maxsplit=1)[1] for part in parts)
      name = json.loads(metadata)["name"]
    return web.json_response(self.put(name, body))

  def download(self, request: web.Request, name: str) -> web.Response:
    generation, content = self.objects[name]
    headers = {"x-goog-generation": str(generation), "ETag": f'"{generation}"'}
    span = request.http_range
    if span.start is None:
      headers["Content-Length"] = str(
        len(content)
      )  # aiohttp would omit a 0 in answer to HEAD
      return web.Response(body=content, headers=headers)
    start, stop, _ = span.indices(len(content))
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
    status = 206 if start < len(content) else 416
    return web.Response(body=content[start:stop], status=status, headers=headers)

  def put(self, name: str, content: bytes) -> dict:
    self.objects[name] = next(self.generations), content
    return self.resource(name)

  def resource(self, name: str) -> dict:
    generation, content = self.objects[name]
    size, generation = str(len(content)), str(generation)
    times = dict(timeCreated=_TIME, updated=_TIME)
    return dict(name=name, bucket="bucket", size=size, generation=generation, **times)

  def listing(self, query) -> dict:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    start, end = query.get("startOffset", ""), query.get("endOffset") or "\U0010ffff"
    items, prefixes = [], set()
    for rest in self.names(prefix):
      if not start <= prefix + rest < end:
        continue
      head, found, _ = rest.partition(delimiter) if delimiter else (rest, "", "")
      if found:
        prefixes.add(f"{prefix}{head}{delimiter}")
      else:
        items.append(self.resource(prefix + rest))
    return dict(kind="storage#objects", items=items, prefixes=sorted(prefixes))

  def answer_s3(self, request: web.Request, name: str, body: bytes) -> web.Response:
    source = urllib.parse.unquote(request.headers.get("x-amz-copy-source", ""))
    source = source.removeprefix("/").removeprefix("bucket/")
    if request.method == "POST" and "delete" in request.query:
      for key in ElementTree.fromstring(body).iterfind(".//{*}Key"):
        self.objects.pop(key.text, None)
      return _xml(200, DeleteResult="")
    if not name and request.method == "GET":
      found = self.listing(request.query)
      size_of = lambda x: dict(Key=x["name"], Size=x["size"], LastModified=_TIME)
      content = dict(
        KeyCount=str(len(found["items"]) + len(found["prefixes"])),
        IsTruncated="false",
        Contents=[size_of(x) for x in found["items"]],
        CommonPrefixes=[dict(Prefix=prefix) for prefix in found["prefixes"]],
      )
      return _xml(200, ListBucketResult=content)
    if not name:
      return web.Response()
    if request.method == "PUT" and not source:
      return web.Response(headers=dict(ETag=f'"{self.put(name, body)["generation"]}"'))
    if (source or name) not in self.objects:
      return _xml(404, Error=dict(Code="NoSuchKey", Message="The key does not exist"))
    if source:
      self.put(name, self.objects[source][1])
      return _xml(200, CopyObjectResult=dict(ETag='"0"'))
    return self.download(request, name)


def _xml(status: int, **content) -> web.Response:
  return web.Response(
    status=status, text=_elements(content), content_type="application/xml"
  )


def _elements(content: str | dict) -> str:
  """Writes a dictionary as XML elements, of which a list has one for each item."""
  if isinstance(content, str):
    return escape(content)
  each = [
    (name, x)
    for name, of in content.items()
    for x in (of if type(of) is list else [of])
  ]
  return "".join(f"<{name}>{_elements(x)}</{name}>" for name, x in each)
