// Creates classes from records, with slots that are the same for all of them.
#include "bind/class.h"

#include <dlfcn.h>
#include <structmember.h>

#include <cstddef>
#include <deque>
#include <vector>

namespace headroom::python::bind {
namespace {

Instance& instance(PyObject* self) { return *reinterpret_cast<Instance*>(self); }

template <typename Slot>
Slot slot_of(PyTypeObject* type, int slot) {
  return reinterpret_cast<Slot>(PyType_GetSlot(type, slot));
}

PyObject* create(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* const self = PyType_GenericAlloc(type, 0);
  if (self != nullptr) new (&instance(self).owner) std::shared_ptr<void>();
  return self;
}

// Replaced by the __init__ of classes that have one.
int refuse_init(PyObject* self, PyObject*, PyObject*) {
  PyErr_Format(PyExc_TypeError, "%R cannot be created by itself", Py_TYPE(self));
  return -1;
}

// Derived classes of Python track an instance for the garbage collector if their base does.
template <bool kCollected>
void destroy(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  if (kCollected) PyObject_GC_UnTrack(self);
  if (instance(self).weak_references != nullptr) PyObject_ClearWeakRefs(self);
  if (kCollected) Py_CLEAR(instance(self).attributes);
  instance(self).owner.~shared_ptr();
  slot_of<freefunc>(type, Py_tp_free)(self);
  Py_DECREF(type);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(instance(self).attributes);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(instance(self).attributes);
  return 0;
}

// What a reader of an instance's memory keeps.
struct View {
  Py_ssize_t count, stride;
};

void forget_memory(PyObject*, Buffer* view) { delete static_cast<View*>(view->internal); }

// A function of CPython's buffer protocol. Every version since 3.10 exports it with this layout of
// Py_buffer, but the limited API lists it from 3.11 on only, so it is looked up by name.
template <typename Signature>
Signature* buffer_function(const char* name) {
  void* const found = dlsym(RTLD_DEFAULT, name);
  if (found == nullptr) throw type_error("This Python has no buffer protocol.");
  return reinterpret_cast<Signature*>(found);
}

}  // namespace

std::shared_ptr<Buffer> get_buffer(handle from, int flags) {
  static auto* const get = buffer_function<int(PyObject*, Buffer*, int)>("PyObject_GetBuffer");
  static auto* const release = buffer_function<void(Buffer*)>("PyBuffer_Release");
  auto filled = std::make_unique<Buffer>();
  check(get(from.ptr(), filled.get(), flags));
  return {filled.release(), [](Buffer* buffer) {
            const gil_scoped_acquire lock;
            release(buffer);
            delete buffer;
          }};
}

bool is_contiguous(const Buffer& buffer) {
  static auto* const ask = buffer_function<int(const Buffer*, char)>("PyBuffer_IsContiguous");
  return ask(&buffer, 'C') != 0;
}

int offer_memory(handle self, Memory (*memory_of)(handle self), Buffer* view, int flags) {
  view->obj = nullptr;
  try {
    const Memory memory = memory_of(self);
    if (memory.read_only && (flags & kBufferWritable) != 0) {
      throw buffer_error("This memory is read-only.");
    }
    auto* const kept = new View{memory.count, memory.item_size};
    *view = {memory.data,
             nullptr,
             memory.item_size * memory.count,
             memory.item_size,
             memory.read_only,
             1,
             nullptr,
             nullptr,
             nullptr,
             nullptr,
             kept};
    if ((flags & kBufferFormat) != 0) view->format = const_cast<char*>(memory.format);
    if ((flags & kBufferShape) != 0) view->shape = &kept->count;
    if ((flags & kBufferStrides) == kBufferStrides) view->strides = &kept->stride;
    view->obj = object::borrow(self).release();
    return 0;
  } catch (...) {
    raise_current_exception();
    return -1;
  }
}

PyTypeObject* make_class(module_& m, const ClassRecord& record) {
  const bool collected =
      record.has_dict ||
      (record.base != nullptr && (PyType_GetFlags(record.base) & Py_TPFLAGS_HAVE_GC) != 0);
  std::vector<PyMemberDef> members;
  if (record.base == nullptr) {  // derived classes inherit the offsets
    members.push_back(
        {"__weaklistoffset__", T_PYSSIZET, offsetof(Instance, weak_references), READONLY, nullptr});
  }
  if (record.has_dict) {
    members.push_back(
        {"__dictoffset__", T_PYSSIZET, offsetof(Instance, attributes), READONLY, nullptr});
  }
  members.push_back({});
  std::vector<PyType_Slot> slots = {
      {Py_tp_new, reinterpret_cast<void*>(&create)},
      {Py_tp_init, reinterpret_cast<void*>(&refuse_init)},
      {Py_tp_dealloc, reinterpret_cast<void*>(collected ? &destroy<true> : &destroy<false>)},
      {Py_tp_members, members.data()}};
  if (record.doc != nullptr) slots.push_back({Py_tp_doc, const_cast<char*>(record.doc)});
  if (collected) {
    slots.push_back({Py_tp_traverse, reinterpret_cast<void*>(&traverse)});
    slots.push_back({Py_tp_clear, reinterpret_cast<void*>(&clear)});
  }
  if (record.offer != nullptr) {  // Py_bf_getbuffer and Py_bf_releasebuffer, see buffer_function()
    slots.push_back({1, reinterpret_cast<void*>(record.offer)});
    slots.push_back({2, reinterpret_cast<void*>(&forget_memory)});
  }
  slots.push_back({});
  const object module_name = m.attr("__name__");
  // CPython before 3.12 keeps the pointer to the name.
  static auto* const names = new std::deque<std::string>();
  names->push_back(string_from(module_name) + "." + record.name);
  auto flags = static_cast<unsigned>(Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE);
  if (collected) flags |= static_cast<unsigned>(Py_TPFLAGS_HAVE_GC);
  PyType_Spec spec = {names->back().c_str(), sizeof(Instance), 0, flags, slots.data()};
  PyObject* const base = reinterpret_cast<PyObject*>(record.base);
  const object bases = base == nullptr ? object() : make_tuple(handle(base));
  object made = object::steal(PyType_FromSpecWithBases(&spec, bases.ptr()));
  auto* const type = reinterpret_cast<PyTypeObject*>(made.ptr());
  m.add(record.name, made);
  made.release();  // classes live as long as the process
  return type;
}

void add_attribute(PyTypeObject* type, const char* name, const object& value) {
  auto* const of = reinterpret_cast<PyObject*>(type);
  check(PyObject_SetAttrString(of, name, value.ptr()));
  if (std::string(name) == "__eq__") check(PyObject_SetAttrString(of, "__hash__", Py_None));
}

void add_property(PyTypeObject* type, const char* name, object (*get)(handle self),
                  const char* doc) {
  static auto* const definitions = new std::deque<PyGetSetDef>();  // descriptors point to them
  const auto call = [](PyObject* self, void* closure) -> PyObject* {
    try {
      return reinterpret_cast<object (*)(handle)>(closure)(self).release();
    } catch (...) {
      raise_current_exception();
      return nullptr;
    }
  };
  definitions->push_back({name, call, nullptr, doc, reinterpret_cast<void*>(get)});
  add_attribute(type, name, object::steal(PyDescr_NewGetSet(type, &definitions->back())));
}

}  // namespace headroom::python::bind
