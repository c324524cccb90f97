"""A server of a bucket on this machine: what gcsfs, TensorStore and s3fs use of gs:// and s3://.

An object is visible once its last byte has arrived, and each write gives it a new generation.
In gs:// conditions of reads and writes on the generation fail as in the real store.
"""

import contextlib
import http.server
import itertools
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from xml.etree import ElementTree

_OBJECTS = r"(?:/upload|/download)?/storage/v1/b/([^/]+)/o"


class Server(http.server.ThreadingHTTPServer):
  """Serves gs://bucket and s3://bucket, which are one: both have the same objects.

  In s3:// `refuse` may return a status for a method and a name.
  """

  daemon_threads = True
  disable_nagle_algorithm = True

  def __init__(self):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.objects: dict[str, tuple[int, bytes]] = {}
    self.generations = itertools.count(1)
    self.lock = threading.Lock()
    self.refuse = lambda method, name: 0

  @property
  def env(self) -> dict[str, str]:
    """The variables that lead gcsfs, google-cloud-storage, TensorStore and s3fs to this server."""
    url = f"http://127.0.0.1:{self.server_address[1]}"
    return dict(
      STORAGE_EMULATOR_HOST=url,
      TENSORSTORE_GCS_HTTP_URL=url,
      GOOGLE_AUTH_TOKEN_FOR_TESTING="token",
      GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",
      AWS_ENDPOINT_URL=url,
      AWS_ACCESS_KEY_ID="key",
      AWS_SECRET_ACCESS_KEY="secret",
      AWS_DEFAULT_REGION="us-east-1",
      NO_PROXY="127.0.0.1",
    )

  def names(self, folder: str = "") -> list[str]:
    return sorted(name.removeprefix(folder) for name in self.objects if name.startswith(folder))


@contextlib.contextmanager
def serve() -> Iterator[Server]:
  with Server() as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  log_message = lambda *_: None

  def handle(self) -> None:
    with contextlib.suppress(ConnectionError):  # gcsfs leaves the slower of two requests
      super().handle()

  def handle_request(self) -> None:
    url = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(url.query))
    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
    path = url.path.replace("//", "/")
    if not path.startswith(("/storage/", "/upload/", "/download/")):
      query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
      _, bucket, *name = urllib.parse.unquote(path).split("/", 2)
      self.handle_s3(bucket, "".join(name), query, body)
      return
    bucket = re.match(r"(?:/upload|/download)?/storage/v1/b/([^/]+)", path)
    name = path.partition("/o/")[2] or query.get("name", "")
    name = urllib.parse.unquote(name)
    if bucket and bucket[1] != "bucket":
      self.answer(404, dict(error=dict(message="The specified bucket does not exist.")))
    elif not re.match(_OBJECTS, path):
      self.answer(200, dict(name="bucket", kind="storage#bucket"))
    else:
      with self.server.lock:
        self.serve_object(path, name, query, body)

  do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

  def serve_object(self, path: str, name: str, query: dict, body: bytes) -> None:
    objects = self.server.objects
    generation, content = objects.get(name, (0, b""))
    wanted, unwanted = query.get("ifGenerationMatch"), query.get("ifGenerationNotMatch")
    if wanted is not None and int(wanted) != generation:
      self.answer(412, dict(error=dict(message="conditionNotMet")))
    elif unwanted is not None and int(unwanted) == generation:
      self.answer(304, b"")
    elif path.startswith("/upload"):
      self.upload(name, query, body)
    elif found := re.fullmatch("(.*)/rewriteTo/b/bucket/o/(.*)", name):
      source, target = found.groups()
      resource = self.put(target, objects[source][1])
      self.answer(200, dict(done=True, resource=resource))
    elif not name:
      self.answer(200, self.listing(query))
    elif not generation:
      self.answer(404, dict(error=dict(message="No such object")))
    elif self.command == "DELETE":
      del objects[name]
      self.answer(204, b"")
    elif query.get("alt") == "media":
      self.download(generation, content)
    else:
      self.answer(200, self.resource(name))

  def upload(self, name: str, query: dict, body: bytes) -> None:
    if "upload_id" in query:  # a resumable upload, of one chunk
      self.answer(200, self.put(name, body))
    elif query["uploadType"] == "resumable":
      name = name or json.loads(body)["name"]
      number = next(self.server.generations)
      quoted = urllib.parse.quote(name, safe="")
      host = f"http://{self.headers['Host']}{urllib.parse.urlsplit(self.path).path}"
      location = f"{host}?uploadType=resumable&name={quoted}&upload_id={number}"
      self.answer(200, b"", Location=location)
    elif query["uploadType"] == "multipart":
      boundary = re.search('boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
      _, metadata, content, _ = re.split(b"\r?\n?--" + re.escape(boundary), body)
      split = lambda part: re.split(b"\r?\n\r?\n", part, maxsplit=1)[1]
      self.answer(200, self.put(json.loads(split(metadata))["name"], split(content)))
    else:
      self.answer(200, self.put(name, body))

  def download(self, generation: int, content: bytes) -> None:
    headers = {"x-goog-generation": str(generation), "ETag": f'"{generation}"'}
    status, span = 200, re.match(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
    if span and span[1]:
      start, stop = int(span[1]), int(span[2] or len(content) - 1) + 1
      headers["Content-Range"] = f"bytes {start}-{min(stop, len(content)) - 1}/{len(content)}"
      status = 206 if start < len(content) else 416
      content = content[start:stop]
    self.answer(status, content, **headers)

  def put(self, name: str, content: bytes) -> dict:
    self.server.objects[name] = next(self.server.generations), content
    return self.resource(name)

  def resource(self, name: str) -> dict:
    generation, content = self.server.objects[name]
    time = "2026-01-01T00:00:00.000Z"
    return dict(
      name=name,
      bucket="bucket",
      size=str(len(content)),
      generation=str(generation),
      timeCreated=time,
      updated=time,
      contentType="application/octet-stream",
    )

  def listing(self, query: dict) -> dict:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
    items, prefixes = [], set()
    for name in self.server.names():
      is_before = name < query.get("startOffset", "") or name >= query.get(
        "endOffset", "\U0010ffff"
      )
      if not name.startswith(prefix) or is_before:
        continue
      head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
      if found:
        prefixes.add(f"{prefix}{head}{delimiter}")
      else:
        items.append(self.resource(name))
    return dict(kind="storage#objects", items=items, prefixes=sorted(prefixes))

  def answer(self, status: int, content: dict | bytes, **headers) -> None:
    is_json = isinstance(content, dict)
    content = json.dumps(content).encode() if is_json else content
    self.send_response(status)
    headers = {"Content-Length": str(len(content)), "Content-Type": "application/json"} | headers
    for key, value in headers.items():
      self.send_header(key, value)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(content)

  # S3 ---------------------------------------------------------------------------------------------

  def handle_s3(self, bucket: str, name: str, query: dict, body: bytes) -> None:
    if bucket != "bucket":
      self.answer_xml(404, "Error", Code="NoSuchBucket", Message="The bucket does not exist")
    elif status := self.server.refuse(self.command, name):
      self.answer_xml(status, "Error", Code="AccessDenied", Message="refused")
    else:
      with self.server.lock:
        self.serve_s3(name, query, body)

  def serve_s3(self, name: str, query: dict, body: bytes) -> None:
    objects = self.server.objects
    source = urllib.parse.unquote(self.headers.get("x-amz-copy-source", ""))
    source = source.removeprefix("/").removeprefix("bucket/")
    if self.command == "POST" and "delete" in query:
      for key in ElementTree.fromstring(body).iterfind(".//{*}Key"):
        objects.pop(key.text, None)
      self.answer_xml(200, "DeleteResult")
    elif not name and self.command == "GET":
      self.answer_xml(200, "ListBucketResult", **self.listing_s3(query))
    elif not name:
      self.answer(200, b"")
    elif self.command == "PUT" and not source:
      generation = self.put(name, body)["generation"]
      self.answer(200, b"", ETag=f'"{generation}"')
    elif (source or name) not in objects:
      self.answer_xml(404, "Error", Code="NoSuchKey", Message="The key does not exist")
    elif source:
      self.put(name, objects[source][1])
      self.answer_xml(200, "CopyObjectResult", ETag='"0"')
    else:
      self.download(*objects[name])

  def listing_s3(self, query: dict) -> dict:
    found = self.listing(query)
    time = "2026-01-01T00:00:00.000Z"
    return dict(
      KeyCount=str(len(found["items"]) + len(found["prefixes"])),
      IsTruncated="false",
      Contents=[dict(Key=x["name"], Size=x["size"], LastModified=time) for x in found["items"]],
      CommonPrefixes=[dict(Prefix=prefix) for prefix in found["prefixes"]],
    )

  def answer_xml(self, status: int, tag: str, **content: str | list[dict]) -> None:
    root = ElementTree.Element(tag)
    for key, value in content.items():
      for item in value if isinstance(value, list) else [value]:
        element = ElementTree.SubElement(root, key)
        if isinstance(item, dict):
          for name, text in item.items():
            ElementTree.SubElement(element, name).text = text
        else:
          element.text = item
    self.answer(status, ElementTree.tostring(root), **{"Content-Type": "application/xml"})
