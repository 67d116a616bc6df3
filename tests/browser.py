"""Control headless Chromium by its DevTools protocol: open a page, and record its requests and console messages."""
import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
FLAGS = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-dev-shm-usage',
         '--disable-background-networking', '--disable-component-update', '--disable-sync', '--remote-debugging-port=0']
SECONDS = 120  # timeout for an answer, on a busy machine


class Browser:
    """A tab of Chromium.

    Attributes:
        events: its requests and console messages, in order.
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
        """Open a page, and wait until its tables are ready."""
        self.call('Page.navigate', url=path.as_uri())
        self.run('new Promise(done => { const look = () => document.querySelector(".dt-container") ? done() : '
                 'setTimeout(look, 20); look() })')

    def requests(self) -> list[str]:
        """Return the requested addresses, without data: addresses, which the page itself contains."""
        found = [event['params']['request']['url'] for event in self.events
                 if event['method'] == 'Network.requestWillBeSent']
        return [url for url in found if not url.startswith('data:')]

    def console(self) -> list[dict]:
        """Return the page's console messages and errors."""
        methods = ('Runtime.consoleAPICalled', 'Runtime.exceptionThrown', 'Log.entryAdded')
        return [event['params'] for event in self.events if event['method'] in methods]


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium with a new profile in this folder."""
    from websockets.sync.client import connect

    command = [CHROMIUM, *FLAGS, f'--user-data-dir={profile}', 'about:blank']
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        # Chromium writes the port of the protocol to a file. Connect to the only tab.
        written = profile / 'DevToolsActivePort'
        while not written.exists() or not written.read_text().strip():
            assert process.poll() is None, f'{CHROMIUM} ended with status {process.returncode}'
            time.sleep(0.02)
        port = written.read_text().split()[0]
        with urllib.request.urlopen(f'http://127.0.0.1:{port}/json/list', timeout=SECONDS) as answer:
            [tab] = [target for target in json.load(answer) if target['type'] == 'page']
        with connect(tab['webSocketDebuggerUrl'], max_size=None) as socket:
            yield Browser(socket)
    finally:
        process.terminate()
        process.wait()
