"""A server of S3 (moto) on this machine, and a proxy before it that cuts, holds, slows down and refuses connections."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cluster.needs import need_modules

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def serve_s3() -> Iterator[int]:
    """Start a server, and give its port."""
    need_modules("flask", "flask_cors", "moto", "s3fs")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", SERVER], text=True, **pipes) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.stdin.close()


class Proxy:
    """Pass connections on to a port, but as these attributes say, which may change at any time."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.refuses = False
        self.is_held = False  # Uploads stand still.
        self.cut_after: int | None = None  # An upload is cut after so many bytes.
        self.bytes_per_second: float | None = None
        self.n_cut = self.n_refused = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = threading.Event()

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            self.n_refused += 1
            writer.transport.abort()
            return
        store_reader, store_writer = await asyncio.open_connection("127.0.0.1", self.target)
        await asyncio.gather(self._send(reader, store_writer, writer), self._return(store_reader, writer))

    async def _send(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: asyncio.StreamWriter
    ) -> None:
        """Pass on what a client sends."""
        sent = 0
        with suppress(ConnectionError):
            while data := await reader.read(4096):
                sent += len(data)
                if self.refuses or (self.cut_after is not None and sent > self.cut_after):
                    self.n_cut += 1
                    client.transport.abort()
                    break
                if self.bytes_per_second is not None:
                    await asyncio.sleep(len(data) / self.bytes_per_second)
                while self.is_held and data.startswith(b"PUT"):
                    await asyncio.sleep(0.05)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _return(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what the store answers."""
        with suppress(ConnectionError):
            while data := await reader.read(4096):
                writer.write(data)
                await writer.drain()
        writer.close()
