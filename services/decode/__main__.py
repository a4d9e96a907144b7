"""`python -m services.decode`: a worker whose default role is decode."""

from halfmoon.rpc.service import service_main
from halfmoon.worker.engine_host import load_shared
from halfmoon.worker.main import serve
from services.decode.settings import DecodeSettings

if __name__ == "__main__":
    service_main("decode", DecodeSettings, serve, load_shared)
