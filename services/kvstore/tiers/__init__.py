"""Where the bytes of blocks lie: DRAM, disk and cold storage, with their allocators, files and codecs."""
