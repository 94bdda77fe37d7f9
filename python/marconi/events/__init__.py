"""Events by which workers publish the blocks and states they hold: records, hashes, wire format and publisher."""
