"""Check a new image from inside; `scripts/image` runs this file. The server must start without root, be healthy, answer
with and without a controller, refuse requests without a key, and end cleanly. Standard library only."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

URL = "http://127.0.0.1:8080"
KEYS = "/var/lib/bridle/keys.db"
PATIENCE = 300  # seconds to the first answer


def ask(path: str, body: object = None, key: str | None = None) -> tuple[int, str]:
    """Send a request; return the status and the text of the answer."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(URL + path, data, headers), timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode}")
        try:
            if ask("/health/ready")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    sys.exit("the server did not become ready")


def main() -> None:
    assert os.getuid() != 0, "the image runs as root"
    added = subprocess.run(
        ["bridle", "keys", "add", "probe", "--keys", KEYS], capture_output=True, text=True, check=True
    )
    key = next(word for word in added.stdout.split() if len(word) > 20)
    server = subprocess.Popen(["bridle", "serve", "demo", "--host", "0.0.0.0", "--keys", KEYS])
    wait_until_ready(server)
    body = {"model": "demo", "prompt": "12 + 34 = ", "max_tokens": 8, "regex": "[0-9]{2}"}
    status, text = ask("/v1/completions", body, key)
    assert status == 200 and json.loads(text)["choices"][0]["text"].isdigit(), (status, text)
    steered = {"model": "demo", "prompt": "Is a dog a mammal? ", "controller": "yesno"}
    status, text = ask("/v1/completions", steered, key)
    assert status == 200 and json.loads(text)["choices"][0]["text"].strip() in ("Yes", "No"), (status, text)
    assert ask("/v1/completions", body)[0] == 401, "strangers are let in"
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0, server.returncode
    print("probe: ready, answers, steers, refuses strangers, ends")


main()
