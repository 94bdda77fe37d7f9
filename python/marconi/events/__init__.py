"""The events by which workers publish what they hold: records, hashes, wire format, and the publisher."""
