// A list of work as kernel arguments: entries by value, so that a launch needs no copy to the device, no allocation and no
// synchronization, and a captured graph holds everything it needs. The optimizers', quantize's and dequantize's lists are such
// tables; one tensor is a table of one entry, whose lookup costs nothing.
#pragma once

#include <cstdint>
#include <utility>

#include "geometry.h"

namespace halfbyte::cuda {

// EntryType has a member `first_task`: how many tasks the entries before it hold. A task is what a warp or a CTA takes at a time.
template <class EntryType, int N>
struct TaskTable {
  using Entry = EntryType;
  static constexpr int kEntries = N;
  Entry entry[N];
  int entries;
  uint32_t tasks;  // less than 2^31
};

// Fills tables and launches each when the next entry does not fit: launch(table) returns 0 or an error, the last of which
// finish() returns.
template <class Table, class Launch>
class TableLauncher {
 public:
  using Status = decltype(std::declval<const Launch&>()(std::declval<Table&>()));
  explicit TableLauncher(const Launch& launch) : launch_(launch) {}

  // False when a launch failed: what follows need not be added.
  bool add(typename Table::Entry entry, uint32_t tasks) {
    const bool fits = table_.entries < Table::kEntries && uint64_t(table_.tasks) + tasks <= uint64_t(kMaxUnitsPerLaunch);
    if (!fits && !flush()) return false;
    entry.first_task = table_.tasks;
    table_.entry[table_.entries++] = entry;
    table_.tasks += tasks;
    return true;
  }

  Status finish() {
    flush();
    return status_;
  }

 private:
  bool flush() {
    if (int(status_) == 0 && table_.entries > 0) status_ = launch_(table_);
    table_.entries = 0;
    table_.tasks = 0;
    return int(status_) == 0;
  }

  const Launch& launch_;
  Table table_{};
  Status status_{};
};

// The entry of each task that a thread comes to, in ascending order: looked up where the last one ends.
template <class Table>
class TaskCursor {
 public:
  HALFBYTE_HD const typename Table::Entry& at(const Table& table, uint32_t task) {
    if constexpr (Table::kEntries == 1) return table.entry[0];
    if (task >= end_) {
      int low = 0, high = table.entries - 1;  // the last entry whose first task is not above this one
      while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (table.entry[middle].first_task <= task) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      entry_ = low;
      end_ = low + 1 < table.entries ? table.entry[low + 1].first_task : table.tasks;
    }
    return table.entry[entry_];
  }

  // Number of a task within its entry.
  HALFBYTE_HD static uint32_t within(const typename Table::Entry& entry, uint32_t task) {
    return Table::kEntries == 1 ? task : task - entry.first_task;
  }

 private:
  int entry_ = 0;
  uint32_t end_ = 0;
};

}  // namespace halfbyte::cuda
