"""`python -m services.prefill`: a worker whose default role is prefill."""

from halfmoon.rpc.service import service_main
from halfmoon.worker.engine_host import load_shared
from halfmoon.worker.main import serve
from services.prefill.settings import PrefillSettings

if __name__ == "__main__":
    service_main("prefill", PrefillSettings, serve, load_shared)
