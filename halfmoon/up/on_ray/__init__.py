"""Services on the hosts of a Ray cluster: Ray places them and watches the hosts, `halfmoon up` supervises as ever.

Read in this order: rooms, process_actor, remote_process, remote_ranks, ray_hosts.
"""
