"""Agents of the endpoint tests. They use only the standard library, so that their processes start fast."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

ASK = [{"role": "user", "content": "Hi"}]


def post(base_url: str, api_key: str, body: dict, path: str = "/chat/completions") -> tuple[int, dict]:
    parts = urlsplit(base_url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=300)
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    connection.request("POST", parts.path + path, json.dumps(body), headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def ask(base_url: str, api_key: str, messages: list = ASK, **fields) -> dict:
    """The assistant's message; an error of the endpoint is raised."""
    status, reply = post(base_url, api_key, {"model": "any", "messages": messages, **fields})
    if status != 200:
        raise RuntimeError(f"{status} {reply['error']['code']}: {reply['error']['message']}")
    return reply["choices"][0]["message"]


def twice(base_url, api_key, messages):
    first = ask(base_url, api_key, messages)
    ask(base_url, api_key, [*messages, first, {"role": "user", "content": "Again."}])
    return 0.5


async def no_reward(base_url, api_key, data):
    ask(base_url, api_key, data["messages"])


class Counting:
    """Each episode has a new object."""

    def __init__(self, bonus: float) -> None:
        self.bonus, self.calls = bonus, 0

    def run(self, data, **others):
        self.calls += 1
        ask(others["base_url"], others["api_key"], data["messages"])
        return {
            "reward": self.calls + self.bonus,
            "told": data["ground_truth"],
            "environment": os.environ["OPENAI_MODEL"],
        }


def raises(base_url, api_key):
    ask(base_url, api_key)
    raise KeyError("the tool is missing")


def exits(base_url, api_key):
    ask(base_url, api_key)
    sys.stdout.write("giving up\n")
    sys.exit(3)


def is_killed(base_url, api_key):
    ask(base_url, api_key)
    os.kill(os.getpid(), signal.SIGKILL)


def never_ends(base_url, api_key, pids):
    """Starts two processes, too, one of them in a separate group."""
    ask(base_url, api_key)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    started = [subprocess.Popen(sleep, start_new_session=each) for each in (False, True)]
    with open(pids, "a") as file:
        file.write(f"{os.getpid()} {started[0].pid} {started[1].pid}\n")
    time.sleep(600)


def never_calls():
    return 1.0


def late(base_url, api_key, file):
    ask(base_url, api_key)
    with open(file, "w") as written:
        written.write(f"{base_url} {api_key}")
    return 1.0


def sometimes_hangs(base_url, api_key, data):
    if "hang" in data:
        time.sleep(600)
    ask(base_url, api_key)
    return 1.0


def rewards_text(base_url, api_key):
    ask(base_url, api_key)
    return "good"


def until_full(base_url, api_key):
    messages = list(ASK)
    while True:
        messages += [ask(base_url, api_key, messages), {"role": "user", "content": "And again, with more words."}]


def stubborn(base_url, api_key):
    """Goes on for a while after it was told that there is no more room."""
    messages = list(ASK)
    for _ in range(30):
        try:
            messages += [ask(base_url, api_key, messages), {"role": "user", "content": "More."}]
        except RuntimeError:
            return


def posts_its_reward(base_url, api_key):
    ask(base_url, api_key)
    assert post(base_url, api_key, {"reward": "much"}, "/reward")[0] == 400
    assert post(base_url, api_key, {"reward": 0.25, "note": "posted"}, "/reward")[0] == 200


def finishes_later(base_url, api_key):
    """Returns at once; a process that is left behind finishes the episode."""
    left, leaves = os.pipe()
    if os.fork():
        # The agent's process group is killed when it returns; until then the child must have left it.
        os.read(left, 1)
        return
    os.setsid()
    os.write(leaves, b"x")
    time.sleep(0.2)
    ask(base_url, api_key)
    post(base_url, api_key, {"reward": 0.75}, "/finish")
    os._exit(0)


def floods(base_url, api_key):
    """Twenty calls at the same time, of which eight are answered."""
    found = []

    def call(number: int) -> None:
        body = {"messages": [{"role": "user", "content": f"Question {number}"}]}
        found.append(post(base_url, api_key, body)[0])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"reward": 1.0, "statuses": sorted(found)}


def hangs_up(base_url, api_key, folder):
    """Disconnects while the model writes, then asks again. Files in ``folder`` tell what the engine has done."""
    parts = urlsplit(base_url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port)
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    body = {"messages": [{"role": "user", "content": "SLOW"}], "stream": True}
    connection.request("POST", parts.path + "/chat/completions", json.dumps(body), headers)
    while not os.path.exists(f"{folder}/0 came"):
        time.sleep(0.01)
    connection.close()
    while not os.path.exists(f"{folder}/1 left"):
        time.sleep(0.01)
    ask(base_url, api_key)
    return 1.0


def meddles(base_url, api_key):
    """Calls that are refused, then one that is not."""
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    before, _, after = base_url.rpartition("/episodes/")
    codes = []
    for url, key, body, path in [
        (base_url, "hw-wrong", {"messages": ASK}, "/chat/completions"),
        (base_url, "", {"messages": ASK}, "/chat/completions"),
        (f"{before}/episodes/other/{after.split('/')[1]}", api_key, {"messages": ASK}, "/chat/completions"),
        (base_url, api_key, {"messages": [{"role": "user", "content": image}]}, "/chat/completions"),
        (base_url, api_key, {"messages": []}, "/chat/completions"),
        (base_url, api_key, {"messages": ASK, "presence_penalty": 1.0}, "/chat/completions"),
        (base_url, api_key, {"messages": ASK, "logit_bias": {"5": 3}}, "/chat/completions"),
        (base_url, api_key, {"prompt": "Hi"}, "/completions"),
        (base_url, api_key, {"messages": [{"role": "wizard", "content": "Hi"}]}, "/chat/completions"),
    ]:
        status, reply = post(url, key, body, path)
        codes.append([status, reply["error"]["code"]])
    ask(base_url, api_key)
    return {"reward": 1.0, "codes": codes}


def sends_megabytes(base_url, api_key):
    body = {"messages": [{"role": "user", "content": "many words " * 300_000}]}
    _, reply = post(base_url, api_key, body)
    ask(base_url, api_key)
    return {"reward": 1.0, "code": reply["error"]["code"]}


def rewards_each(base_url, api_key, branches=False):
    """A reward for each completion, by its id."""
    _, first = post(base_url, api_key, {"messages": ASK})
    said = [*ASK, first["choices"][0]["message"], {"role": "user", "content": "Again."}]
    _, second = post(base_url, api_key, {"messages": said})
    rewards = {first["id"]: 0.25, second["id"]: 0.5}
    if branches:
        _, other = post(base_url, api_key, {"messages": [{"role": "user", "content": "A part"}]})
        post(base_url, api_key, {"messages": [{"role": "user", "content": "Without a reward"}]})
        rewards[other["id"]] = 2.0
    return rewards


def rewards_choices(base_url, api_key):
    """A reward for each choice of one call."""
    _, reply = post(base_url, api_key, {"messages": ASK, "n": 3})
    return {f"{reply['id']}/{choice['index']}": float(choice["index"]) for choice in reply["choices"]}


async def answers_async(base_url, api_key, messages):
    await asyncio.to_thread(ask, base_url, api_key, messages)
    return 0.25


async def sleeps(base_url, api_key):
    await asyncio.sleep(600)


class AnswersWhenCalled:
    """An object that is called, and whose call is async."""

    async def __call__(self, base_url: str, api_key: str, messages: list) -> float:
        return await answers_async(base_url, api_key, messages)


class InheritsItsCall(AnswersWhenCalled):
    pass


def is_cancelled(base_url: str) -> None:
    raise asyncio.CancelledError


def asks_wrongly(base_url: str, api_key: str, messages: list) -> float:
    """One call with another key, one to another API, and one that is answered."""
    post(base_url, "wrong", {"messages": messages})
    post(base_url, api_key, {"input": "x"}, path="/embeddings")
    ask(base_url, api_key, messages)
    return 0.5
