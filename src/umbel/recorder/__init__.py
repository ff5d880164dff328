"""From the broker to the event log: every event that is heard becomes a row on disk.

Its modules, each on those above it:

    log          the directory or bucket: its layout, what makes it a log, what is refused
    disks        local directories and object stores: a file is there whole or not at all
    rows         events as Arrow columns
    manifests    what a segment says of itself: rows, and sequence numbers per incarnation
    segments     collects rows, writes them as segments, tells what may be acknowledged
    sorting      from a message's body to rows; what is no event goes to quarantine
    retention    old days go, but for rows that are carried over
    compaction   many small segments become few
    importing    events from JSON lines
    checking     what is in a log, from the ends of its segments only
    run          takes messages from the broker and gives them back when they are on disk
"""
