"""Serves a bucket on this machine: what gcsfs, TensorStore and s3fs use of it.

An object is visible once its last byte has arrived. Each write has a new generation.
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

TIME = "2026-01-01T00:00:00.000Z"


@contextlib.contextmanager
def serve() -> Iterator["Bucket"]:
  bucket, loop = Bucket(), asyncio.new_event_loop()
  app = web.Application(client_max_size=2**30)
  app.router.add_route("*", "/{path:.*}", bucket.answer)
  thread = threading.Thread(target=loop.run_forever, daemon=True)
  thread.start()
  server = TestServer(app)
  asyncio.run_coroutine_threadsafe(server.start_server(), loop).result()
  bucket.url = f"http://127.0.0.1:{server.port}"
  yield bucket
  asyncio.run_coroutine_threadsafe(server.close(), loop).result()
  loop.call_soon_threadsafe(loop.stop)
  thread.join()
  loop.close()


def refuse_none(method: str, name: str) -> int:
  return 0


class Bucket:
  """Holds gs://bucket and s3://bucket, which are one: both have the same objects.

  In s3:// `refuse` may return a status for a method and a name.
  """

  def __init__(self):
    self.objects: dict[str, tuple[int, bytes]] = {}
    self.generations = itertools.count(1)
    self.refuse = refuse_none

  @property
  def env(self) -> dict[str, str]:
    """The variables that lead gcsfs, TensorStore and s3fs to this server."""
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
    names = [name for name in self.objects if name.startswith(folder)]
    return sorted(name.removeprefix(folder) for name in names)

  async def answer(self, request: web.Request) -> web.Response:
    path, body = request.path.replace("//", "/"), await request.read()
    pattern = r"(?:/upload|/download)?/storage/v1/b/([^/]+)(/o(?:/(.*))?)?"
    gs = re.match(pattern, path)
    if gs:
      bucket, is_object, name = gs.groups("")
      if bucket != "bucket":
        error = {"message": "The bucket does not exist"}
        return web.json_response({"error": error}, status=404)
      if not is_object:
        return web.json_response(dict(name="bucket", kind="storage#bucket"))
      return self.answer_gs(request, name or request.query.get("name", ""), body)
    _, bucket, *rest = path.split("/", 2)
    if bucket != "bucket":
      return s3_error(404, "NoSuchBucket", "The bucket does not exist")
    name = "".join(rest)
    status = self.refuse(request.method, name)
    if status:
      return s3_error(status, "AccessDenied", "refused")
    return self.answer_s3(request, name, body)

  def answer_gs(self, request: web.Request, name: str, body: bytes) -> web.Response:
    query = request.query
    generation, _ = self.objects.get(name, (0, b""))
    if query.get("ifGenerationMatch", str(generation)) != str(generation):
      return web.json_response({"error": {}}, status=412)
    if query.get("ifGenerationNotMatch") == str(generation):
      return web.Response(status=304)
    if request.path.startswith("/upload"):
      return self.upload(request, name, body)
    copied = re.fullmatch("(.*)/rewriteTo/b/bucket/o/(.*)", name)
    if copied:
      resource = self.put(copied[2], self.objects[copied[1]][1])
      return web.json_response(dict(done=True, resource=resource))
    if not name:
      return web.json_response(self.listing(query))
    if not generation:
      return web.json_response({"error": {}}, status=404)
    return self.answer_gs_object(request, name)

  def answer_gs_object(self, request: web.Request, name: str) -> web.Response:
    if request.method == "DELETE":
      del self.objects[name]
      return web.Response(status=204)
    if request.query.get("alt") == "media":
      return self.download(request, name)
    return web.json_response(self.resource(name))

  def upload(self, request: web.Request, name: str, body: bytes) -> web.Response:
    kind = request.query["uploadType"]
    if kind == "resumable" and "upload_id" not in request.query:  # then comes one chunk
      name = urllib.parse.quote(name or json.loads(body)["name"], safe="")
      url = f"{self.url}{request.path}?uploadType=resumable&name={name}&upload_id=1"
      return web.Response(headers=dict(Location=url))
    if kind == "multipart":
      content_type = request.headers["Content-Type"]
      boundary = re.search('boundary="?([^";]+)', content_type)[1]
      _, *parts, _ = re.split(b"\r?\n?--" + re.escape(boundary.encode()), body)
      metadata, body = (re.split(b"\r?\n\r?\n", part, maxsplit=1)[1] for part in parts)
      name = json.loads(metadata)["name"]
    return web.json_response(self.put(name, body))

  def download(self, request: web.Request, name: str) -> web.Response:
    generation, content = self.objects[name]
    headers = {"x-goog-generation": str(generation), "ETag": f'"{generation}"'}
    span = request.http_range
    if span.start is None:
      # aiohttp would omit a 0 in answer to HEAD.
      headers["Content-Length"] = str(len(content))
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
    times = dict(timeCreated=TIME, updated=TIME)
    return dict(name=name, bucket="bucket", size=size, generation=generation, **times)

  def listing(self, query) -> dict:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    items, prefixes = [], set()
    for rest in self.names(prefix):
      if delimiter and delimiter in rest:
        prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
      else:
        items.append(self.resource(prefix + rest))
    return dict(kind="storage#objects", items=items, prefixes=sorted(prefixes))

  def answer_s3(self, request: web.Request, name: str, body: bytes) -> web.Response:
    if request.method == "POST" and "delete" in request.query:
      for key in ElementTree.fromstring(body).iterfind(".//{*}Key"):
        self.objects.pop(key.text, None)
      return xml_response(200, "<DeleteResult/>")
    if not name and request.method == "GET":
      return self.list_s3(request.query)
    if not name:
      return web.Response()
    if request.method == "PUT":
      return self.put_s3(request, name, body)
    if name not in self.objects:
      return s3_error(404, "NoSuchKey", "The key does not exist")
    return self.download(request, name)

  def put_s3(self, request: web.Request, name: str, body: bytes) -> web.Response:
    source = urllib.parse.unquote(request.headers.get("x-amz-copy-source", ""))
    source = source.removeprefix("/").removeprefix("bucket/")
    if not source:
      generation = self.put(name, body)["generation"]
      return web.Response(headers={"ETag": f'"{generation}"'})
    self.put(name, self.objects[source][1])
    return xml_response(200, '<CopyObjectResult><ETag>"0"</ETag></CopyObjectResult>')

  def list_s3(self, query) -> web.Response:
    listing = self.listing(query)
    parts = ["<IsTruncated>false</IsTruncated>"]
    for item in listing["items"]:
      key = f"<Key>{escape(item['name'])}</Key><Size>{item['size']}</Size>"
      parts.append(f"<Contents>{key}<LastModified>{TIME}</LastModified></Contents>")
    for prefix in listing["prefixes"]:
      prefix = f"<Prefix>{escape(prefix)}</Prefix>"
      parts.append(f"<CommonPrefixes>{prefix}</CommonPrefixes>")
    parts.append(f"<KeyCount>{len(parts) - 1}</KeyCount>")
    return xml_response(200, f"<ListBucketResult>{''.join(parts)}</ListBucketResult>")


def s3_error(status: int, code: str, message: str) -> web.Response:
  text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
  return xml_response(status, text)


def xml_response(status: int, text: str) -> web.Response:
  return web.Response(status=status, text=text, content_type="application/xml")
