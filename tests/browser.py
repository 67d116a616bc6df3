"""Chromium without a window, driven by its DevTools protocol: opens a page, and keeps what it requests and logs."""
import base64
import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
FLAGS = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-dev-shm-usage',
         '--disable-background-networking', '--disable-component-update', '--disable-sync', '--remote-debugging-port=0']
SECONDS = 120  # until an answer must have come, on a machine that has other work


class Browser:
    """A tab of Chromium.

    Attributes:
        events: what it reported, in order: requests, and lines on the console.
    """

    def __init__(self, socket):
        self.socket = socket
        self.events = []
        self.calls = 0
        for domain in ('Page', 'Network', 'Runtime', 'Log'):
            self.call(f'{domain}.enable')

    def receive(self) -> dict:
        message = json.loads(self.socket.recv(SECONDS))
        if 'method' in message:
            self.events.append(message)
        return message

    def call(self, method: str, **parameters) -> dict:
        """Call a method of the protocol, and return its result."""
        self.calls += 1
        self.socket.send(json.dumps({'id': self.calls, 'method': method, 'params': parameters}))
        while True:
            message = self.receive()
            if message.get('id') == self.calls:
                assert 'error' not in message, message
                return message['result']

    def run(self, script: str):
        """Return the value of a JavaScript expression."""
        found = self.call('Runtime.evaluate', expression=script, returnByValue=True, awaitPromise=True)
        assert 'exceptionDetails' not in found, found
        return found['result'].get('value')

    def open(self, path: Path) -> None:
        """Open a page, and wait until its tables can be sorted."""
        self.call('Page.navigate', url=path.as_uri())
        self.run('new Promise(done => { const look = () => document.querySelector(".dt-container") ? done() : '
                 'setTimeout(look, 20); look() })')

    def requests(self) -> list[str]:
        """Return the addresses that were requested, but for what the page itself contains."""
        found = [event['params']['request']['url'] for event in self.events
                 if event['method'] == 'Network.requestWillBeSent']
        return [url for url in found if not url.startswith('data:')]

    def console(self) -> list[dict]:
        """Return what the page wrote to the console, and its errors."""
        methods = ('Runtime.consoleAPICalled', 'Runtime.exceptionThrown', 'Log.entryAdded')
        return [event['params'] for event in self.events if event['method'] in methods]

    def screenshot(self, path: Path, width: int, dark: bool, height: int | None = None) -> None:
        """Write a picture of the whole page at a width in pixels, or of its first `height` pixels."""
        scheme = [{'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}]
        self.call('Emulation.setEmulatedMedia', features=scheme)
        self.call('Emulation.setDeviceMetricsOverride', width=width, height=height or 800, deviceScaleFactor=1,
                  mobile=width < 600)
        whole = height is None
        picture = self.call('Page.captureScreenshot', captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture['data']))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with a new profile in a folder."""
    from websockets.sync.client import connect

    command = [CHROMIUM, *FLAGS, f'--user-data-dir={folder}', 'about:blank']
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        address = next(filter(None, (re.search('ws://[^ ]+', line) for line in process.stderr)))[0].strip()
        with connect(address, max_size=None) as socket:
            of_chromium = Browser.__new__(Browser)
            of_chromium.socket, of_chromium.events, of_chromium.calls = socket, [], 0
            targets = of_chromium.call('Target.getTargets')['targetInfos']
            [tab] = [target['targetId'] for target in targets if target['type'] == 'page']
        port = address.split('/devtools/')[0]
        with connect(f'{port}/devtools/page/{tab}', max_size=None) as socket:
            yield Browser(socket)
    finally:
        process.terminate()
        process.wait()
