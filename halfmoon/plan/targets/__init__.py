"""Maps over targets: at which TTFT and TPOT separate prefill and decode workers pay."""
