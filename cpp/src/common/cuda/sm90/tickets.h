// Handing out work to resident CTAs as they become free.
//
// A launch gets a counter of its own, zero when it starts: CTA c begins with unit c, and then draws tickets. The last
// CTA to leave puts the counter back to zero, whatever the others did, so that nothing has to be cleared before a
// launch. Counters are taken round robin, by each device for itself, from a pool of more than are issued to it while
// one launch runs.
//
// A captured launch would keep its counter for ever, and two executable graphs made of one capture would share it:
// under capture there is none (null), and CTAs take units in a fixed order.
#pragma once

#include <cstdint>

namespace ragged_attention::sm90 {

struct TicketCounter {
  std::uint32_t drawn;
  std::uint32_t left;  // CTAs that have left
};

// On the current device, which is `device`; null where `stream` is being captured.
TicketCounter* next_ticket_counter(int device, void* stream);

}  // namespace ragged_attention::sm90
