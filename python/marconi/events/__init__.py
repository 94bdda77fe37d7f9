"""The events by which workers say what they hold: records, hashes, wire format, and the publisher."""
