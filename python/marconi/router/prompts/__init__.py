"""From a request's JSON body to the token ids that its worker makes of it."""
