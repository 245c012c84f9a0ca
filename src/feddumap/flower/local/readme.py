"""The README of a federation's folder."""

README = """\
# A federation

This folder was made by `feddumap flower init`. To try it on this machine:

```sh
feddumap flower up {path}
```

It starts a server and its devices, trains, shows its progress and stops them all. Run again, it resumes
where it stopped. The run is in `run/`, a log of every process in `logs/`.

| | |
|---|---|
| `config.toml` | what is trained, and how: `feddumap train --help` explains the keys |
| `pyproject.toml`, `federation/` | the Flower app: two modules that call feddumap |
| `keys/ca.crt` | the certificate that devices verify the server with; its authority's key was not kept |
| `keys/server.crt`, `keys/server.key` | the server's certificate and key |
| `keys/node-0`, `keys/node-0.pub` … | every device's key pair |
| `devices.toml` | which public key is which device; a node with another key is refused |
| `keys/superexec.secret` | the secret that the server's two processes share |
| `keys/control.token` | the token that the SuperLink requires of `flwr`, which has it in `.flower` |

The files in `keys/` and `.flower/` are secret, except `ca.crt` and `*.pub`. Only the owner may read this
folder.

## On several machines

`pip install 'feddumap[flower]'` on all of them, in the same versions. This folder stays on the server.

On the server, in this folder, each in its own terminal or service:

```sh
export FLWR_HOME=$PWD/.flower FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1

python -m feddumap.flower.local.superlink --control-token-file keys/control.token \\
  --host 0.0.0.0 --port {port} --enable-supernode-auth \\
  --ssl-ca-certfile keys/ca.crt --ssl-certfile keys/server.crt --ssl-keyfile keys/server.key \\
  --isolation process --superexec-auth-secret-file keys/superexec.secret \\
  --database .flower/superlink.db

python -m feddumap.flower.local.prefork --runtime-api-address 127.0.0.1:{port} \\
  --root-certificates keys/ca.crt --superexec-auth-secret-file keys/superexec.secret
```

Once, tell the SuperLink the devices, which it remembers in its database:

```sh
for key in keys/node-*.pub; do flwr supernode register "$key" federation; done
```

On device 0, with `ca.crt` and `node-0` from `keys/` (on device 1 with `node-1` and `partition-id=1`, and so
on up to {last}; several on one machine need another `--port` than 9094 each, such as `--port 9095`):

```sh
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1

flower-supernode --superlink {address} --root-certificates ca.crt \\
  --auth-supernode-private-key node-0 --node-config 'partition-id=0'
```

On the server, to train, and to resume after an interruption:

```sh
flwr run . federation --stream
```

The server's two programs are `flower-superlink` and `flower-superexec` with little around them. With Flower's
own `flower-superlink`, whoever reaches its port may start runs, which is to say run programs on the server
and the devices, because its control interface asks for no password. The documentation of feddumap,
docs/deploy.md, says what is open to whom.
"""
