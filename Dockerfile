# One image, one target a service: docker build --target gateway|prefill|decode|kvstore|planner|console .
# Each takes its part of the file that HALFMOON_CONFIG names; its own options and variables go before that. Each listens beyond
# loopback, and so needs HALFMOON_CLUSTER_SECRET_FILE or HALFMOON_CLUSTER_SECRET: docker-compose.yml gives each role its own.
# For NVIDIA GPUs: --build-arg TORCH_BACKEND=cu128 (or auto), and run with --gpus; TORCH_BACKEND= takes the index's default build.
# `scripts/lock --images` adds the digest of the base image; without one, its tag decides what is built on.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE} AS libraries

ARG EXTRAS=

ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    OMP_WAIT_POLICY=PASSIVE \
    TOKENIZERS_PARALLELISM=false \
    GRPC_VERBOSITY=ERROR \
    HALFMOON_CACHE_DIR=/cache \
    HF_HOME=/cache/huggingface

# The user owns the places of the volumes: a new named volume takes its owner from here.
RUN groupadd --gid 10001 halfmoon \
 && useradd --uid 10001 --gid 10001 --create-home halfmoon \
 && install -d -o halfmoon -g halfmoon /app /cache \
 && install -d -m 0700 -o halfmoon -g halfmoon /state /secrets /secrets/root /secrets/worker /secrets/gateway /secrets/store \
      /secrets/planner /secrets/operator

# Everything but PyTorch comes from the lock: each file is compared with its hash. The libraries' own tests go.
WORKDIR /app
COPY pyproject.toml requirements.lock ./
COPY scripts/lock scripts/setup scripts/
RUN python scripts/lock --print "tls,tracing,$EXTRAS,no-torch" >/tmp/requirements.txt \
 && pip install --no-deps --require-hashes -r /tmp/requirements.txt && rm /tmp/requirements.txt \
 && find "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" -type d -name tests -prune -exec rm -r {} +
VOLUME ["/cache", "/state"]

FROM libraries AS wheel
COPY . .
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheel .

# What computes nothing has neither PyTorch nor a compiler.
FROM libraries AS service
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl
USER halfmoon

FROM service AS kvstore
USER root
RUN python scripts/lock --print kvstore,no-torch >/tmp/requirements.txt \
 && pip install --no-deps --require-hashes -r /tmp/requirements.txt && rm /tmp/requirements.txt
USER halfmoon
EXPOSE 7003 9100
HEALTHCHECK --interval=15s --timeout=12s --start-period=30s --retries=3 \
    CMD ["timeout", "10", "python", "-m", "halfmoon.rpc.health_probe", "127.0.0.1:7003"]
ENTRYPOINT ["python", "-m", "halfmoon.up.service", "kvstore"]
CMD ["--listen", "0.0.0.0:7003"]

FROM service AS console
USER root
RUN python scripts/lock --print console,no-torch >/tmp/requirements.txt \
 && pip install --no-deps --require-hashes -r /tmp/requirements.txt && rm /tmp/requirements.txt
USER halfmoon
EXPOSE 8501
HEALTHCHECK --interval=15s --timeout=12s --start-period=30s --retries=3 \
    CMD ["timeout", "10", "python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8501/_stcore/health', timeout=4)"]
ENTRYPOINT ["python", "-m", "halfmoon.up.service", "console", "--server.headless", "true", "--server.address", "0.0.0.0", \
    "--server.port", "8501", "--browser.gatherUsageStats", "false"]

# The CPU kernels are compiled for the processor that runs them, and Triton compiles its launchers. The planner reads models of any
# kind. uv knows where each build of PyTorch is. DEMO_MODEL= leaves the demo model out.
FROM libraries AS models
ARG TORCH_VERSION=2.13.0
ARG TORCH_BACKEND=cpu
ARG EXTRAS=
ARG DEMO_MODEL=demo-model
# What Triton and torch compile on GPUs is loaded from there: the home directory is read-only, and Docker's /tmp noexec.
ENV TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor
RUN apt-get update -q && apt-get install -qy --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python scripts/lock --print "$EXTRAS,$DEMO_MODEL,${TORCH_BACKEND:+setup}" >/tmp/requirements.txt \
 && pip install --no-deps --require-hashes -r /tmp/requirements.txt && rm /tmp/requirements.txt \
 && if [ -n "$TORCH_BACKEND" ]; then \
      uv pip install --system --no-cache --torch-backend="$TORCH_BACKEND" "torch==$TORCH_VERSION" \
      && pip uninstall --yes uv; \
    else \
      pip install "torch==$TORCH_VERSION"; \
    fi
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps /wheel/*.whl
USER halfmoon

# The demo model without its weights: a gateway needs no more of it.
FROM models AS described
ARG DEMO_MODEL=demo-model
USER root
RUN if [ -n "$DEMO_MODEL" ]; then HALFMOON_CACHE_DIR=/tmp/cache python -m halfmoon.engine.checkpoint.description demo /described; fi \
 && rm -rf /tmp/cache && mkdir -p /described

# The probe tells whether the gateway itself is up; GET /health, whether it could place a request now. Probes end by
# themselves: Docker forgets those that take too long, but they run on, and on a host that is too busy they pile up.
FROM service AS gateway
COPY --from=described /described /described
ENV HALFMOON_DEMO_DIR=/described
EXPOSE 8000 7000
HEALTHCHECK --interval=15s --timeout=12s --start-period=120s --retries=3 \
    CMD ["timeout", "10", "python", "-m", "halfmoon.rpc.health_probe", "127.0.0.1:7000"]
ENTRYPOINT ["python", "-m", "halfmoon.up.service", "gateway"]
CMD ["--host", "0.0.0.0", "--port", "8000", "--cluster-listen", "0.0.0.0:7000", "--state-dir", "/state"]

FROM models AS prefill
EXPOSE 7001 9100
HEALTHCHECK --interval=15s --timeout=12s --start-period=300s --retries=3 \
    CMD ["timeout", "10", "python", "-m", "halfmoon.rpc.health_probe", "127.0.0.1:7001"]
ENTRYPOINT ["python", "-m", "halfmoon.up.service", "prefill"]
CMD ["--listen", "0.0.0.0:7001", "--advertise", "prefill:7001", "--gateway", "gateway:7000"]

FROM models AS decode
EXPOSE 7002 9100
HEALTHCHECK --interval=15s --timeout=12s --start-period=300s --retries=3 \
    CMD ["timeout", "10", "python", "-m", "halfmoon.rpc.health_probe", "127.0.0.1:7002"]
ENTRYPOINT ["python", "-m", "halfmoon.up.service", "decode"]
CMD ["--listen", "0.0.0.0:7002", "--advertise", "decode:7002", "--gateway", "gateway:7000"]

FROM models AS planner
EXPOSE 7004 9100
HEALTHCHECK --interval=15s --timeout=12s --start-period=30s --retries=3 \
    CMD ["timeout", "10", "python", "-m", "halfmoon.rpc.health_probe", "127.0.0.1:7004"]
ENTRYPOINT ["python", "-m", "halfmoon.up.service", "planner"]
CMD ["--listen", "0.0.0.0:7004"]
