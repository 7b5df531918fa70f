"""Programs that nobody changed, in several languages, under ``twiceshy run`` over HTTPS: killed, and nothing twice.

One keeper, one sidecar and one sandbox over TLS serve the whole module.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from proxy import kit
from sandbox.client import PROJECT, Sandbox
from tests.kill.launchers import Bench, until

#: The sandbox speaks TLS.
WORLD = {"tls": True}


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed here: not tried over TLS")
    return found


# Each agent orders, writes a mail and kills itself once in between; then orders another thing. What it gets the second
# time is what it got the first time.

AIOHTTP = """
import aiohttp, asyncio
async def main():
    async with aiohttp.ClientSession() as session:
        async def post(path, body):
            async with session.post(URL + path, json=body) as answer:
                assert answer.status in (200, 201, 202), await answer.text()
                return await answer.json()
        await post("/orders", {"lines": [{"sku": "rice", "count": 1}], "total": 1})
        if turn == 1: os.kill(os.getpid(), 9)
        await post("/email/send", {"to": "a@example.org", "subject": "s", "text": "t"})
asyncio.run(main())
"""

URLLIB = "order()\nif turn == 1: os.kill(os.getpid(), 9)\nmail()"

SHELL = """
set -e
post() { curl -sS --fail-with-body -H 'Content-Type: application/json' -d "$2" "$SANDBOX_URL$1"; }
post /orders '{"lines": [{"sku": "rice", "count": 1}], "total": 1}'
[ -e "$HERE/died" ] || { touch "$HERE/died"; kill -9 $$; }
post /email/send '{"to": "a@example.org", "subject": "s", "text": "t"}'
"""

NODE = """
const fs = require('fs'), http = require('http'), https = require('https');
const { SANDBOX_URL: base, HERE: here } = process.env;
const own = new https.Agent({ keepAlive: true });
const asked = {
  fetch: async (path, body) => {
    const answer = await fetch(base + path, { method: 'POST', body, headers: { 'Content-Type': 'application/json' } });
    if (!answer.url.startsWith(base)) throw new Error(answer.url);
    return [answer.status, await answer.text()];
  },
  request: async (path, body) => {
    const headers = { 'Content-Type': 'application/json' };
    const answer = await fetch(new Request(base + path, { method: 'POST', body, headers }));
    return [answer.status, await answer.text()];
  },
};
for (const [name, agent] of [['https', undefined], ['agent', own], ['noagent', false]])
  asked[name] = (path, body) => new Promise((done, fail) => {
    const options = { method: 'POST', agent, headers: { 'Content-Type': 'application/json' } };
    const asking = https.request(base + path, options, (answer) => {
      let text = '';
      answer.setEncoding('utf8').on('data', (data) => (text += data)).on('end', () => done([answer.statusCode, text]));
      answer.on('error', fail);
    });
    asking.on('error', fail).end(body);
  });
(async () => {
  const post = asked[process.argv[2]];
  const first = await post('/orders', '{"lines": [{"sku": "rice", "count": 1}], "total": 1}');
  if (first[0] > 201) throw new Error(first);
  if (!fs.existsSync(here + '/died')) {
    fs.writeFileSync(here + '/died', '');
    process.kill(process.pid, 'SIGKILL');
    await new Promise(() => {});
  }
  const second = await post('/email/send', '{"to": "a@example.org", "subject": "s", "text": "t"}');
  if (second[0] > 202) throw new Error(second);
  own.destroy();
})();
"""


def survives(bench: Bench, *command: str) -> None:
    code, out, err = bench.run(*command)
    assert code == 0, (out, err)
    assert "2 attempts (died) · 2 live, 1 replayed" in err, (out, err)
    assert (bench.made("orders"), bench.made("email")) == (1, 1)
    urls = bench.world.fetch("SELECT url FROM twiceshy.step WHERE run_id = $1", bench.run_id)
    assert all(row["url"].startswith("https://") for row in urls)
    assert len(urls) == 2


def test_urllib(bench: Bench) -> None:
    bench.agent(URLLIB)
    survives(bench)


def test_aiohttp_without_trust_env(bench: Bench) -> None:
    bench.agent(AIOHTTP)
    survives(bench)


def test_curl(bench: Bench) -> None:
    program("curl")
    survives(bench, "sh", "-c", SHELL)


@pytest.mark.parametrize(
    "how",
    ["fetch", "https", *(pytest.param(how, marks=pytest.mark.check_all) for how in ("request", "agent", "noagent"))],
)
def test_node(bench: Bench, how: str) -> None:
    (bench.folder / "agent.js").write_text(NODE)
    survives(bench, program("node"), str(bench.folder / "agent.js"), how)


REDIRECTED = """
(async () => {
  const answer = await fetch(process.env.SANDBOX_URL + '/any/start');
  if (answer.status !== 200 || !answer.redirected || !answer.url.endsWith('/any/end')) throw new Error(answer.url);
  const stream = await fetch(process.env.SANDBOX_URL + '/any/stream', {
    method: 'POST', duplex: 'half',
    body: new ReadableStream({ start(c) { c.enqueue(new TextEncoder().encode('text')); c.close(); } }) });
  if ((await stream.json()).size !== 4) throw new Error('the body did not come');
  const many = await Promise.all([...Array(20).keys()].map((n) => fetch(process.env.SANDBOX_URL + '/any/' + n)));
  if (many.some((each) => each.status !== 200)) throw new Error('many');
  const http = require('http'), net = require('net');
  const where = process.env.HERE + '/socket';
  const server = http.createServer((_, answer) => answer.end('local')).listen(where, () =>
    http.get({ socketPath: where, path: '/' }, (answer) => { answer.resume(); server.close(); }));
})();
"""


@pytest.mark.check_all
def test_nodes_fetch_is_its_own_but_for_the_way(bench: Bench) -> None:
    """Redirects are followed inside the journal, streams go up, sockets of this machine are left alone."""
    node = program("node")
    bench.sandbox.fault(match={"path": "/any/start"}, status=302, headers={"Location": "/any/end"})
    (bench.folder / "agent.js").write_text(REDIRECTED)
    code, out, err = bench.run(node, str(bench.folder / "agent.js"))
    assert code == 0, (out, err)
    rows = bench.world.fetch("SELECT url FROM twiceshy.step WHERE run_id = $1", bench.run_id)
    assert len(rows) == 23


@pytest.mark.check_all
def test_node_in_plain_http(bench: Bench, tmp_path: Path) -> None:
    node = program("node")
    (bench.folder / "agent.js").write_text(
        "const http = require('http');\n"
        "http.get(process.env.PLAIN + '/any/a', (a) => a.resume().on('end', async () => {\n"
        "  const b = await fetch(process.env.PLAIN + '/any/b');\n"
        "  if (a.statusCode !== 200 || b.status !== 200) process.exit(1);\n"
        "}));"
    )
    with Sandbox.start(tmp_path / "plain.log") as plain:
        code, out, err = bench.run("env", f"PLAIN={plain.url}", node, str(bench.folder / "agent.js"))
        assert code == 0, (out, err)
        assert len(plain.requests("any")) == 2
    rows = bench.world.fetch("SELECT url FROM twiceshy.step WHERE run_id = $1 ORDER BY url", bench.run_id)
    assert [row["url"] for row in rows] == [f"{plain.url}/any/a", f"{plain.url}/any/b"]


def test_killed_inside_a_post_it_joins(bench: Bench) -> None:
    bench.sandbox.fault(match={"path": "/email/send"}, hold="mail")
    bench.agent("mail()")
    launcher = bench.launch()
    bench.sandbox.wait_held("mail")
    [agent] = bench.agents()
    subprocess.run(["kill", "-9", str(agent)], check=True)
    until(lambda: bench.starts == 2, "it is started again")
    bench.sandbox.release("mail")
    code, _, err = bench.end(launcher)
    assert code == 0, err
    assert bench.made("email") == 1
    assert "joined" in err


# ---- what it needs in a Python

BUNDLED = """
import ssl, urllib.request
context = ssl.create_default_context(cafile=os.environ["OWN_BUNDLE"])
handler = urllib.request.HTTPSHandler(context=context)
opener = urllib.request.build_opener(handler)
with opener.open(URL + "/pantry") as answer: assert answer.status == 200
server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=os.environ["OWN_BUNDLE"])
assert len(server.get_ca_certs()) == 1, "a server does not take clients that the sidecar signs"
"""


@pytest.mark.check_all
def test_a_library_with_a_bundle_of_its_own(bench: Bench) -> None:
    """stripe brings one, and reads no variable."""
    bench.agent(BUNDLED)
    code, _, err = bench.run("env", f"OWN_BUNDLE={bench.sandbox.ca}", *bench.command)
    assert code == 0, err


def test_nothing_is_imported_that_the_program_does_not(bench: Bench) -> None:
    bench.program.write_text(
        "import sys\nassert 'sitecustomize' in sys.modules\n"
        "sys.exit([name for name in ('ssl', 'importlib.util', 'aiohttp') if name in sys.modules] or 0)"
    )
    code, _, err = bench.run()
    assert code == 0, err


@pytest.mark.check_all
def test_a_sitecustomize_that_was_there_is_run_as_well(bench: Bench) -> None:
    (bench.folder / "sitecustomize.py").write_text("import builtins\nbuiltins.was_here = __file__\n")
    bench.agent("assert was_here.startswith(HERE), was_here\norder()")
    script = f'PYTHONPATH="$PYTHONPATH:{bench.folder}" exec "$@"'
    code, _, err = bench.run("sh", "-c", script, "sh", *bench.command)
    assert code == 0, err
    assert bench.made("orders") == 1


def test_the_library_can_be_imported(bench: Bench) -> None:
    bench.agent("import twiceshy\nassert os.environ['TWICESHY_HOME'] in twiceshy.__file__, twiceshy.__file__")
    assert bench.run()[0] == 0


# ---- what is not reached, and who says so

DISTRUSTING = """
try:
    order()
except urllib.error.URLError as error:
    assert "CERTIFICATE_VERIFY_FAILED" in str(error), error
else:
    sys.exit("it was reached")
"""


@pytest.mark.check_all
def test_an_isolated_python_is_told_of(bench: Bench) -> None:
    """``python -I`` ignores the variables by which it would learn of the CA: not reached, and the summary says so."""
    bench.agent(DISTRUSTING)
    code, _, err = bench.run("env", "-u", "SSL_CERT_FILE", sys.executable, "-I", str(bench.program))
    assert code == 0, err
    assert "note: 127.0.0.1: this client does not trust the CA" in err
    assert "(attempt 1)" in err
    assert bench.made("orders") == 0
    told = json.loads(bench.verb("show", "--json", bench.run_id).stdout)
    assert told["attempts"][0]["hints"][0].startswith("127.0.0.1: this client does not trust the CA")
    assert "does not trust the CA" in bench.verb("show", bench.run_id).stdout


def test_a_node_without_the_ca_is_told_of(bench: Bench) -> None:
    node = program("node")
    (bench.folder / "agent.js").write_text(
        "fetch(process.env.SANDBOX_URL + '/pantry').then(() => process.exit(7), () => process.exit(0))"
    )
    code, _, err = bench.run("env", "-u", "NODE_EXTRA_CA_CERTS", node, str(bench.folder / "agent.js"))
    assert code == 0, err
    assert "the CA" in err


def test_the_kit_is_laid_out_once_and_is_for_others_to_read(tmp_path: Path) -> None:
    first, second = kit.lay_out(tmp_path), kit.lay_out(tmp_path)
    assert first == second
    assert [path.name for path in (tmp_path / "site").iterdir()] == [first.site.name]
    for path in (first.site, first.preload, first.ca, first.bundle, first.site / "sitecustomize.py"):
        assert path.stat().st_mode & 0o004, path


@pytest.mark.check_all
def test_two_kits_on_one_path_do_not_call_each_other(bench: Bench, tmp_path: Path) -> None:
    """As in a shell that an older version set up, or by another state folder."""
    (tmp_path / "other").mkdir()
    other = kit.lay_out(tmp_path / "other").site
    bench.agent("import ssl\norder()")
    script = f'PYTHONPATH="$PYTHONPATH:{other}:$PYTHONPATH" exec "$@"'
    code, _, err = bench.run("sh", "-c", script, "sh", *bench.command)
    assert code == 0, err
    assert "Error" not in err
    assert bench.made("orders") == 1


@pytest.mark.check_all
def test_a_kit_is_the_same_whoever_lays_it_out(bench: Bench, tmp_path: Path) -> None:
    """Also a twiceshy that finds the library in a kit, because an agent started it."""
    made = kit.lay_out(tmp_path)
    script = f"from pathlib import Path; from proxy import kit; print(kit.lay_out(Path({str(tmp_path)!r})).site)"
    command = [sys.executable, "-c", script]
    environment = bench.world.environment | {"PYTHONPATH": f"{made.site}:{PROJECT}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(made.site)


@pytest.mark.check_all
def test_a_command_beside_one(bench: Bench) -> None:
    bench.agent("order()")
    (bench.folder / "start.sh").write_text(f"#!/bin/sh\nexec {sys.executable} {bench.program}\n")
    (bench.folder / "start.sh").chmod(0o755)
    code, _, err = bench.run("./start.sh")
    assert code == 0, err
